"""The file of spans: what is written, what is left of it when it grows, what is no span."""

import json
from pathlib import Path

import pytest

from mrl.errors import RecordError
from mrl.metrics.timeline import FiledSpan, TimelineWriter, every_minutes, is_kept, read_timeline
from mrl.records.codec import decode, encode
from mrl.records.host_messages import inbox_decoder
from mrl.records.telemetry_messages import Span, SpansRecord

T0 = 1_700_000_040.0
"""The beginning of an even minute."""


def record(*spans: Span, role: str = "learner/qwen") -> SpansRecord:
    return SpansRecord(role=role, policy="qwen", spans=list(spans))


def span(began_s: float, duration_s: float = 1.0, kind: str = "training", **more: object) -> Span:
    return Span(kind=kind, began_unix_s=T0 + began_s, duration_s=duration_s, **more)  # type: ignore[arg-type]


def test_a_span_comes_back_as_it_was(tmp_path: Path) -> None:
    """With its role, to a tenth of a millisecond; what is empty takes no room on the line."""
    path = tmp_path / "timeline.jsonl"
    wait = span(2.00004, 0.5, "awaiting groups", whom="workers of qwen", is_wait=True)
    TimelineWriter(path).write(record(span(0.12345), wait))
    TimelineWriter(path).write(record(span(1.0, 0.25, "verifying", is_beside=True), role="worker/qwen/0"))
    assert list(read_timeline(path)) == [
        FiledSpan(began_unix_s=T0 + 0.1235, duration_s=1.0, role="learner/qwen", kind="training"),
        FiledSpan(
            began_unix_s=T0 + 2.0,
            duration_s=0.5,
            role="learner/qwen",
            kind="awaiting groups",
            whom="workers of qwen",
            is_wait=True,
        ),
        FiledSpan(began_unix_s=T0 + 1.0, duration_s=0.25, role="worker/qwen/0", kind="verifying", is_beside=True),
    ]
    assert set(json.loads(path.read_bytes().splitlines()[0])) == {"began_unix_s", "duration_s", "role", "kind"}


def test_a_file_stays_within_its_bound_and_keeps_whole_minutes(tmp_path: Path) -> None:
    """Evenly over the run; the file says which, a second writer goes on in the same, and nothing else is in it."""
    path, lengths = tmp_path / "timeline.jsonl", []
    for first in (0, 40):
        writer = TimelineWriter(path, max_bytes=20_000)
        for minute in range(first, first + 40):
            writer.write(record(*(span(60 * minute + 2 * number) for number in range(30))))
            lengths.append(path.stat().st_size)
    every = every_minutes(path)
    assert every > 2
    assert max(lengths) < 20_000 + 5_000
    minutes = [int(one.began_unix_s) // 60 for one in read_timeline(path)]
    start = int(T0) // 60
    assert minutes == [minute for minute in range(start, start + 80) if minute % every == 0 for _ in range(30)]
    assert lengths[-1] > 5_000, "no more is thrown away than has to be"
    assert is_kept(60.0 * every + 59.9, every)
    assert not is_kept(60.0 * every + 60.0, every)


def test_what_was_left_out_is_left_out_after_a_restart(tmp_path: Path) -> None:
    """Another writer, however much room it has, goes on in the same minutes."""
    path = tmp_path / "timeline.jsonl"
    first = TimelineWriter(path, max_bytes=100)
    first.write(record(span(0.0), span(60.0)))
    assert every_minutes(path) == 2
    TimelineWriter(path).write(record(*(span(60.0 * minute) for minute in range(2, 6))))
    told: list[str] = []
    assert [one.began_unix_s - T0 for one in read_timeline(path, told.append)] == [0.0, 120.0, 240.0]
    assert told == [], "the line that tells the minutes is no damage"


def test_a_torn_end_is_left_out_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    """A killed supervisor costs one line at most; a file that is not there is empty."""
    path = tmp_path / "timeline.jsonl"
    assert list(read_timeline(path)) == []
    assert every_minutes(path) == 1
    TimelineWriter(path).write(record(span(0.0)))
    with path.open("ab") as file:
        file.write(b'{"began_unix_s":17')
    assert len(list(read_timeline(path))) == 1
    TimelineWriter(path).write(record(span(1.0)))
    assert [one.began_unix_s for one in read_timeline(path)] == [T0, T0 + 1.0]


@pytest.mark.parametrize("damage", [b"{broken", b"[]", b'{"began_unix_s":1}', b"\xff"])
def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, damage: bytes) -> None:
    """With its number."""
    path = tmp_path / "timeline.jsonl"
    TimelineWriter(path).write(record(span(0.0), span(1.0)))
    path.write_bytes(path.read_bytes() + damage + b"\n")
    told: list[str] = []
    assert [one.began_unix_s for one in read_timeline(path, told.append)] == [T0, T0 + 1.0]
    assert told == [f"{path}:3: skipped a damaged line"]


@pytest.mark.parametrize("began", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_time_that_is_none_is_refused_at_the_door(began: float) -> None:
    """The writer never meets it."""
    with pytest.raises(RecordError, match="began_unix_s"):
        decode(encode(record(Span(kind="training", began_unix_s=began, duration_s=1.0))), inbox_decoder)
