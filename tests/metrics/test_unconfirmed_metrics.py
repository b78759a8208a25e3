"""What a role that ends leaves for a supervisor that does not listen."""

import json
from pathlib import Path

import pytest

from mrl.metrics.jsonl import MetricsWriter, read_tail
from mrl.metrics.telemetry import Telemetry
from mrl.metrics.unconfirmed_metrics import UnconfirmedMetrics, UnconfirmedMetricsReader
from mrl.records.codec import decode, encode
from mrl.records.host_messages import inbox_decoder
from mrl.records.telemetry_messages import MetricsRecord


class Role:
    """A role and the link that it posts to; `steps_left` are those of the rows in its file."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.posted: list[bytes] = []
        self.unheard = UnconfirmedMetrics(lambda body: not self.posted.append(body), max_bytes=max_bytes)
        self.telemetry = Telemetry("worker/a/0", "a", self.unheard.say)
        self.folder, self.path = folder, folder / "unheard" / "one.msgpack"

    def measures(self, *steps: int) -> None:
        for step in steps:
            self.telemetry.metrics(step, {"reward/mean": 0.5})

    def beats(self) -> bytes:
        self.unheard.say(self.telemetry.beat())
        return self.posted[-1]

    def ends(self) -> None:
        self.unheard.settle(self.telemetry.beat(), self.path, 0.01)

    def steps_left(self) -> list[int]:
        rows: list[MetricsRecord] = []
        metrics = self.folder / "none.jsonl"
        metrics.touch()
        UnconfirmedMetricsReader(self.path.parent, metrics).take(rows.append)
        return [row.step for row in rows]


def test_what_no_heartbeat_confirmed_is_left(tmp_path: Path) -> None:
    """What was said before a heartbeat that came back has arrived; a strange message confirms nothing."""
    role = Role(tmp_path)
    role.measures(1)
    first = role.beats()
    role.measures(2)
    role.beats()
    role.measures(3)
    role.unheard.came_back(first)
    role.unheard.came_back(b"strange")
    role.ends()
    assert role.path.stat().st_mode & 0o077 == 0
    assert role.steps_left() == [2, 3]
    assert not role.path.exists()


def test_a_role_that_was_heard_leaves_nothing(tmp_path: Path) -> None:
    """Not even an empty file, and it does not wait."""
    role = Role(tmp_path)
    role.measures(1)
    role.unheard.came_back(role.beats())
    num_posted = len(role.posted)
    role.ends()
    assert not role.path.parent.exists()
    assert len(role.posted) == num_posted


def test_the_last_heartbeat_is_awaited(tmp_path: Path) -> None:
    """Its return within the bound is as good as any."""
    role = Role(tmp_path)
    role.unheard = UnconfirmedMetrics(lambda body: not role.unheard.came_back(body))
    role.telemetry = Telemetry("worker/a/0", "a", role.unheard.say)
    role.measures(1)
    role.ends()
    assert not role.path.parent.exists()


def test_the_oldest_are_given_up_beyond_the_bound(tmp_path: Path) -> None:
    """A role that talks for hours to nobody holds no more than that."""
    role = Role(tmp_path)
    role.measures(1)
    role = Role(tmp_path, max_bytes=3 * len(role.posted[0]) + len(encode(role.telemetry.beat())))
    role.measures(*range(1, 100))
    role.ends()
    assert role.steps_left() == [97, 98, 99]


def test_no_row_is_written_twice(tmp_path: Path) -> None:
    """Neither one that had arrived before its role left it, nor one that comes over the link later."""
    role = Role(tmp_path)
    role.measures(1, 2)
    role.ends()
    first, second = (decode(body, inbox_decoder) for body in role.posted[:2])
    assert isinstance(first, MetricsRecord)
    assert isinstance(second, MetricsRecord)
    new = MetricsRecord(role="worker/a/0", policy="a", step=3, time_unix_s=9.0, values={})
    metrics = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(metrics)
    writer.write(first)
    left = UnconfirmedMetricsReader(role.path.parent, metrics)
    assert not left.had(second)
    left.take(writer.write)
    writer.close()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]
    assert left.had(first)
    assert left.had(second)
    assert not left.had(new)


def test_a_damaged_file_is_removed_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends no run."""
    role = Role(tmp_path)
    role.path.parent.mkdir()
    role.path.write_bytes(b"\xc1 torn")
    assert role.steps_left() == []
    assert not role.path.exists()
    assert "damaged" in capsys.readouterr().out


def test_the_tail_of_a_file_is_its_last_whole_lines(tmp_path: Path) -> None:
    """The line that the bound cuts, a torn end and damage are left out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2}\nrubbish\n{"step":3}\n{"st')
    assert read_tail(path, 1 << 20) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert read_tail(path, path.stat().st_size - 3) == [{"step": 2}, {"step": 3}]
