"""Trackers: the real packages, offline, read back by their own readers; and processes that hang, fail or die."""

import contextlib
import html
import importlib.util
import io
import json
import os
import re
import signal
import sqlite3
import struct
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mrl.cli.main import main
from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.config.schema import RunConfig
from mrl.metrics.jsonl import MetricsWriter
from mrl.metrics.rollout_files import Rollout, RolloutFiles, path_of
from mrl.metrics.trackers.sample_table import COLUMNS, SampleFile, read_table
from mrl.metrics.trackers.tracker import Points, TrackedRun, points_of
from mrl.processes import trackers
from mrl.processes.trackers import TrackerFeed, Trackers
from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.page import write_report
from mrl.report.run_data import read_run
from tests.support.word_runs import word_run

PAGE = Path(__file__).parents[2] / "docs/trackers.md"
BOUND_S = 60.0
SECRET = "a-key-of-the-user-0123456789"
STARTS = 'say(\'{"started": {"run_id": "x", "where": "here"}}\'); '
FAKE = """\
import sys, time
def say(text):
    sys.stdout.write(text + "\\n"); sys.stdout.flush()
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Whatever a test does, none of its processes may outlive it."""
    yield
    assert psutil.Process().children(recursive=True) == []


def needed(package: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"pip install 'mrl[{package}]'")


def config_in(folder: Path, *tables: dict[str, Any]) -> RunConfig:
    run = {"folder": str(folder), "min_free_mib": 0}
    return word_run({"a": {}, "b": {"source": SECRET}}, run=run, trackers=list(tables))


def record(policy: str, step: int, *, role: str = "", **values: float) -> MetricsRecord:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return MetricsRecord(
        role=role or f"learner/{policy}", policy=policy, step=step, time_unix_s=1e9 + step, values=named
    )


def records(first: int) -> list[MetricsRecord]:
    """Three steps of two policies, the second twice as fast, and what a worker and the supervisor say."""
    steps = [record("a", step, reward__mean=step / 8, loss__total=float("nan")) for step in range(first, first + 3)]
    steps += [record("b", 2 * step, reward__mean=step / 4) for step in range(first, first + 3)]
    others = [
        record("a", first, role="worker/a/0", rollout__groups=7.0),
        record("", first, role="supervisor", process__count=5.0),
    ]
    return steps + others


def tracked(folder: Path, table: dict[str, Any], first: int = 1) -> tuple[Trackers, list[str]]:
    """A run of one attempt, its trackers closed; another attempt where the folder has it already."""
    config = config_in(folder, table)
    run = create_run_folder(config, resume=(folder / "r").exists())
    fed = Trackers(config, run, run.logs)
    for one in records(first):
        fed.offer(one)
    fed.close(BOUND_S)
    return fed, fed.take_lines()


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Series -> (step, seconds, value) of each point, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert "config" in events.Tags()["tensors"]
    return {
        tag: [(one.step, one.wall_time, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_what_two_attempts_wrote(tmp_path: Path) -> None:
    """One folder of event files: every finite value at its policy's step, when it was measured."""
    needed("tensorboard")
    _, lines = tracked(tmp_path, {"kind": "tensorboard"})
    fed, _ = tracked(tmp_path, {"kind": "tensorboard"}, first=4)

    found = tensorboard_scalars(tmp_path / "r/trackers/tensorboard/r")
    assert found["a/reward/mean"] == [(step, 1e9 + step, step / 8) for step in range(1, 7)]
    assert [point[0] for point in found["b/reward/mean"]] == [2, 4, 6, 8, 10, 12]
    assert found["a/worker_0/rollout/groups"] == [(1, 1e9 + 1, 7.0), (4, 1e9 + 4, 7.0)]
    assert set(found) == {"a/reward/mean", "b/reward/mean", "a/worker_0/rollout/groups", "run/process/count"}
    assert lines == [f"tracker tensorboard: tensorboard --logdir {tmp_path}/r/trackers/tensorboard"]
    assert fed.values() == {"tracker/points/tensorboard": 11.0, "tracker/lost_points/tensorboard": 0.0}


def trackio_rows(database: Path) -> list[tuple[str, str, int, dict[str, float]]]:
    """(id of the run, its name, step, values) in the order of writing."""
    with sqlite3.connect(database) as opened:
        rows = opened.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    opened.close()
    return [(run_id, name, step, json.loads(values)) for run_id, name, step, values in rows]


def test_trackio_has_both_attempts_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its database; with the configuration, but no key of the user."""
    needed("trackio")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = {"kind": "trackio", "folder": str(tmp_path / "kept"), "project": "games"}
    tracked(tmp_path, table)
    fed, lines = tracked(tmp_path, table, first=4)

    rows = trackio_rows(tmp_path / "kept/games.db")
    assert len({run_id for run_id, *_ in rows}) == 1
    assert [(step, values) for _, _, step, values in rows if "a/reward/mean" in values] == [
        (step, {"a/reward/mean": step / 8}) for step in range(1, 7)
    ]
    assert [step for _, _, step, values in rows if "b/reward/mean" in values] == [2, 4, 6, 8, 10, 12]
    with sqlite3.connect(tmp_path / "kept/games.db") as opened:
        ((config,),) = opened.execute("SELECT config FROM configs").fetchall()
    opened.close()
    assert json.loads(config)["run"]["steps"] == 3
    assert json.loads(config)["policies"]["b"]["source"] == "***"
    assert lines == [f"tracker trackio: TRACKIO_DIR={tmp_path}/kept trackio show --project games"]
    assert fed.values()["tracker/lost_points/trackio"] == 0.0


def wandb_records(file: Path) -> list[Any]:
    """Records of an offline run, by wandb's own messages.

    Its package has no reader in Python: the file is LevelDB's log, parts of records in blocks of 32 KiB, each with a
    header of checksum, length and place (1 whole, 2 first, 3 middle, 4 last), behind 7 bytes of wandb's own.
    """
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        if left < 7 or kind == 0:
            place += left
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def test_wandb_offline_has_both_attempts_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series is drawn over the step of its own policy; the key of the user is in no file."""
    needed("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    key = SECRET + "0" * 20
    monkeypatch.setenv("WANDB_API_KEY", key)
    for first in (1, 4):
        fed, lines = tracked(tmp_path, {"kind": "wandb", "options": {"tags": ["small"]}}, first=first)
        assert fed.values() == {"tracker/points/wandb": 11.0, "tracker/lost_points/wandb": 0.0}, lines

    files = sorted((tmp_path / "r/trackers/wandb").rglob("*.wandb"))
    found = [one for file in files for one in wandb_records(file)]
    assert len(files) == 2
    assert len({one.run.run_id for one in found if one.WhichOneof("record_type") == "run"}) == 1
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
        for one in found
        if one.WhichOneof("record_type") == "history"
    ]
    assert [(row["a/step"], row["a/reward/mean"]) for row in history if "a/reward/mean" in row] == [
        (step, step / 8) for step in range(1, 7)
    ]
    over = {one.metric.glob_name: one.metric.step_metric for one in found if one.WhichOneof("record_type") == "metric"}
    assert (over["a/*"], over["b/*"], over["run/*"]) == ("a/step", "b/step", "run/step")
    written = [file for folder in ("trackers", "logs") for file in (tmp_path / "r" / folder).rglob("*")]
    assert len(written) > 5
    assert [file for file in written if file.is_file() and key.encode() in file.read_bytes()] == []


def swanlab_records(folder: Path) -> list[Any]:
    """Records of the offline runs in a folder, in the order of writing, by SwanLab's own reader."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = []
    for file in sorted(folder.rglob("*.swanlab"), key=lambda file: file.stat().st_mtime_ns):
        reader = DataStoreReader()
        reader.open(file)
        while (data := reader.scan()) is not None:
            found.append(Record.FromString(data))
        reader.close()
    return found


def test_swanlab_offline_has_both_attempts_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finite value at its policy's step; the key of the user and what SwanLab sees of the host are in no file."""
    needed("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_API_KEY", SECRET)
    for first in (1, 4):
        fed, lines = tracked(tmp_path, {"kind": "swanlab", "options": {"tags": ["small"]}}, first=first)
        assert fed.values() == {"tracker/points/swanlab": 11.0, "tracker/lost_points/swanlab": 0.0}, lines
        assert lines[0].startswith(f"tracker swanlab: swanlab sync {tmp_path}/r/trackers/swanlab/run-")

    found = swanlab_records(tmp_path / "r/trackers/swanlab")
    assert len({one.start.id for one in found if one.HasField("start")}) == 1
    scalars = [(one.scalar.key, one.scalar.step, one.scalar.value.number) for one in found if one.HasField("scalar")]
    assert [(step, value) for key, step, value in scalars if key == "a/reward/mean"] == [
        (step, step / 8) for step in range(1, 7)
    ]
    assert [step for key, step, _ in scalars if key == "b/reward/mean"] == [2, 4, 6, 8, 10, 12]
    assert {key for key, *_ in scalars} == {
        "a/reward/mean",
        "b/reward/mean",
        "a/worker_0/rollout/groups",
        "run/process/count",
    }
    assert [one for one in found if one.HasField("log")] == []
    written = [file for folder in ("trackers", "logs") for file in (tmp_path / "r" / folder).rglob("*")]
    config = [file.read_text() for file in written if file.name == "config.yaml"]
    assert "steps" in config[0]
    kept = [file for file in written if file.is_file() and file.suffix != ".swanlab"]
    assert [file for file in kept if SECRET.encode() in file.read_bytes()] == []
    assert [json.loads(file.read_bytes())["hardware"] for file in kept if "metadata" in file.name] == [None, None]


HOSTILE = "1 | 2 <b>x</b> &amp; <script>x</script> **b**\n[a](b)"


def rollout(policy: str, step: int, number: int, **rest: Any) -> Rollout:
    named = {"kind": "rollout", "source": policy, "completion": f"answer {number}"} | rest
    return Rollout(
        policy=policy, step=step, task="t", prompt_id="p", prompt=f"prompt {number}", reward=number / 8, **named
    )


def keep_answers(folder: RunFolder, *steps: int) -> None:
    """Answers of policy a: eight of its own, the first of them hostile, and one of b that rescued it."""
    files = RolloutFiles(folder.rollouts, "a", 1 << 20)
    for step in steps:
        own = [rollout("a", step, number) for number in range(1, 8)]
        rescue = rollout("a", step, 8, kind="rescue", source="b")
        files.write(step, [rollout("a", step, 0, completion=HOSTILE), *own, rescue])


SHOWN = [
    ("a", 4, "prompt 8", "answer 8", 1.0, "b"),
    ("a", 4, "prompt 0", HOSTILE, 0.0, ""),
    ("a", 4, "prompt 4", "answer 4", 0.5, ""),
]
"""The table of three rows of that."""


def test_a_table_has_rescues_and_prompts_all_over_the_step(tmp_path: Path) -> None:
    """At most half of it rescues, unless there is nothing else; long texts are cut; a file that is gone is an error."""
    folder = RunFolder(tmp_path)
    keep_answers(folder, 4)

    def table(num: int, step: int = 4) -> list[Any]:
        path = str(path_of(folder.rollouts, "a", step))
        return read_table(SampleFile(path=path, num_rows=num, time_unix_s=1.0)).rows

    assert table(3) == SHOWN
    assert table(1) == [SHOWN[1]]
    assert len(table(200)) == 9
    files = RolloutFiles(folder.rollouts, "a", 1 << 20)
    long = rollout("a", 5, 1, completion="x" * 5000)
    files.write(5, [long, *(rollout("a", 5, number, kind="rescue", source="b") for number in range(4))])
    assert [row[5] for row in table(4, step=5)] == ["b", "b", "b", ""]
    assert table(4, step=5)[3][3] == "x" * 4000 + " [...]"
    with pytest.raises(FileNotFoundError, match=r"no answers in .*step_6/a\.jsonl\.gz"):
        table(3, step=6)


def shown_in(kind: str, tmp_path: Path) -> list[tuple[int, list[tuple[Any, ...]]]]:
    """(step, rows) of each table of policy a that a tracker has, by its own reader."""
    match kind:
        case "trackio":
            rows = trackio_rows(tmp_path / "kept/mrl.db")
            found = [(step, values["a/samples"]) for *_, step, values in rows if "a/samples" in values]
            return [(step, [tuple(row[name] for name in COLUMNS) for row in table["_value"]]) for step, table in found]
        case "wandb":
            tables = sorted((tmp_path / "kept").rglob("*.table.json"))
            found = [json.loads(table.read_bytes()) for table in tables]
            assert [table["columns"] for table in found] == [list(COLUMNS)] * len(found)
            return sorted((table["data"][0][1], [tuple(row) for row in table["data"]]) for table in found)
        case "swanlab":
            media = [one.media for one in swanlab_records(tmp_path / "kept") if one.HasField("media")]
            assert {one.key for one in media} == {"a/samples"}
            return [(one.step, [(item.caption, _text_of(item, tmp_path)) for item in one.value.items]) for one in media]
    raise AssertionError(kind)


def _text_of(item: Any, tmp_path: Path) -> str:
    (file,) = tmp_path.rglob(item.filename)
    return file.read_text()


@pytest.mark.parametrize("kind", ["swanlab", "trackio", "wandb"])
def test_samples_of_some_steps_are_shown_as_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of every second step, once each, whichever other records of a step there are."""
    needed(kind)
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(name, "offline")
    table = {"kind": kind, "samples": 3, "samples_every": 2, "folder": str(tmp_path / "kept")}
    config = config_in(tmp_path, table)
    run = create_run_folder(config)
    keep_answers(run, 2, 3, 4)
    fed = Trackers(config, run, run.logs)
    for step in (0, 2, 2, 3, 4):
        fed.offer(record("a", step, reward__mean=0.5))
        fed.offer(record("a", step, role="worker/a/0", rollout__groups=7.0))
    fed.close(BOUND_S)

    assert fed.values() == {f"tracker/points/{kind}": 12.0, f"tracker/lost_points/{kind}": 0.0}, fed.take_lines()
    found = shown_in(kind, tmp_path)
    assert [step for step, _ in found] == [2, 4]
    captioned = [
        (f"reward {reward}" + f", rescued by {by}" * bool(by), f"prompt: {prompt}\n\nanswer: {answer}")
        for _, _, prompt, answer, reward, by in SHOWN
    ]
    assert found[1][1] == (captioned if kind == "swanlab" else SHOWN)


def test_tensorboard_shows_answers_as_they_are(tmp_path: Path) -> None:
    """As a table of its own Markdown, in which nothing of an answer is markup; a replay shows them again."""
    needed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what TensorBoard brings along warns of itself
        from tensorboard.plugin_util import markdown_to_safe_html

    table = {"kind": "tensorboard", "samples": 3, "samples_every": 4}
    config = config_in(tmp_path, table)
    run = create_run_folder(config)
    keep_answers(run, 4)
    writer = MetricsWriter(run.metrics_jsonl)
    for step in (4, 8):  # the answers of step 8 are gone
        writer.write(record("a", step, reward__mean=0.5))
    writer.close()
    assert main(["report", str(run.path), "--to", "tensorboard"]) == 0

    events = EventAccumulator(str(run.path / "trackers/tensorboard-replay/r-replay"), size_guidance={"tensors": 0})
    events.Reload()
    ((step, wall_time_s, text),) = [
        (one.step, one.wall_time, one.tensor_proto.string_val[0]) for one in events.Tensors("a/samples")
    ]
    assert (step, wall_time_s) == (4, 1e9 + 4)
    page = markdown_to_safe_html(text)
    cells = [re.sub(r"\s+", " ", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", page, re.DOTALL)]
    assert len(cells) == 3 * len(COLUMNS)
    assert re.findall(r"<th.*?>(.*?)</th>", page) == list(COLUMNS)
    assert cells[:6] == ["a", "4", "prompt 8", "answer 8", "1.0", "b"]
    shown = html.unescape(cells[9].replace("<br>", "\n").replace("\n ", "\n"))
    assert shown == HOSTILE
    assert "<script" not in page
    assert "<strong>" not in page


def test_answers_that_are_gone_cost_a_table_and_no_values(tmp_path: Path) -> None:
    """It counts as one lost point, and is said."""
    needed("tensorboard")
    config = config_in(tmp_path, {"kind": "tensorboard", "samples": 3, "samples_every": 1})
    run = create_run_folder(config)
    fed = Trackers(config, run, run.logs)
    fed.offer(record("a", 1, reward__mean=0.5))
    fed.close(BOUND_S)

    assert fed.values() == {"tracker/points/tensorboard": 1.0, "tracker/lost_points/tensorboard": 1.0}
    assert "points are lost: FileNotFoundError: no answers in " in fed.take_lines()[1]


def feed(tmp_path: Path, code: str) -> TrackerFeed:
    """A feed whose tracker's process is this code, after the run was read."""
    run = TrackedRun(kind="wandb", project="p", name="r")
    argv = (sys.executable, "-c", FAKE + code)
    return TrackerFeed(run, label="wandb", id_file=None, log=tmp_path / "tracker.log", argv=argv)


def points(num: int = 1) -> Points:
    return points_of(record("a", 1, **{f"loss__{n}": 0.0 for n in range(num)}))


def test_a_tracker_that_hangs_loses_points_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room in its queue is counted; one line says so, and one at the end how many."""
    monkeypatch.setattr(trackers, "MAX_QUEUED", 5)
    hung = feed(tmp_path, STARTS + "sys.stdin.readline(); time.sleep(1000)")
    while not hung.take_lines():  # it has started
        assert not hung.has_ended(0.01)
    hung.offer(points())
    began_s = time.monotonic()
    while hung._queue:  # the first is with the process, which never answers
        assert time.monotonic() - began_s < BOUND_S
    for _ in range(12):
        hung.offer(points(3))
    assert hung.take_lines() == ["tracker wandb: points are lost: the tracker is too slow, or hangs"]
    assert hung.num_lost == 7 * 3

    hung.close()

    assert (hung.num_taken, hung.num_lost) == (0, 12 * 3 + 1)
    assert hung.take_lines() == [
        "tracker wandb: 37 of 37 points are lost; `mrl report RUN --to wandb` sends all points again"
    ]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ('say(\'{"failure": "UsageError: no login"}\')', "UsageError: no login"),
        ("sys.exit(4)", "the tracker process ended with exit code 4"),
        (STARTS + "sys.stdin.readline(); sys.exit(5)", "the tracker process ended with exit code 5"),
        ("say('rubbish')", "the tracker process ended"),
        (STARTS + 'say(\'{"num_failed": 1, "failure": "ValueError: no"}\'); sys.stdin.read()', "ValueError: no"),
    ],
)
def test_a_tracker_that_fails_loses_what_it_has_not_taken(tmp_path: Path, code: str, told: str) -> None:
    """With its reason in one line."""
    offered = tmp_path / "offered"
    gate = f"import os\nwhile not os.path.exists({str(offered)!r}): time.sleep(0.01)\n"
    failing = feed(tmp_path, gate + code)
    failing.offer(points())
    offered.touch()
    failing.end()
    assert failing.has_ended(BOUND_S)
    failing.close()

    lines = [line for line in failing.take_lines() if "here" not in line]
    assert failing.num_lost == 1
    assert told in lines[0]
    assert lines[0].startswith("tracker wandb: points are lost: ")
    assert len(lines) == 2


def test_one_that_hangs_when_it_should_finish_is_killed_with_its_children(tmp_path: Path) -> None:
    """In a hurry after `HURRIED_S`; the grandchild would outlive it."""
    code = STARTS + "import subprocess; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    config = config_in(tmp_path)
    fed = Trackers(config, create_run_folder(config), tmp_path)
    fed._feeds.append(feed(tmp_path, code))
    began_s = time.monotonic()
    fed.close(1000.0, is_hurried=lambda: True)

    assert time.monotonic() - began_s < BOUND_S
    assert fed.take_lines()[-1] == "tracker wandb: failed: the tracker did not finish in time"


def test_keys_do_not_reach_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, nor in addresses; other words do, up to a bound."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setattr(trackers, "MAX_LOG_BYTES", 60)
    say = "sys.stderr.write('key {} at http://me:pw@host/\\n' * 9); sys.stderr.flush()"
    talking = feed(tmp_path, STARTS + say.format(SECRET) + "; sys.stdin.read(); say('{}')")
    talking.end()
    assert talking.has_ended(BOUND_S)
    talking.close()

    assert talking.take_lines() == ["tracker wandb: here"]
    assert (tmp_path / "tracker.log").read_text() == ("key *** at http://***@host/\n" * 9)[:60]


def test_a_finished_run_is_replayed_as_often_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mrl report RUN --to tensorboard`: all of metrics.jsonl, each time as a run of its own."""
    needed("tensorboard")
    folder = create_run_folder(config_in(tmp_path))
    writer = MetricsWriter(folder.metrics_jsonl)
    for one in records(1):
        writer.write(one)
    writer.close()

    for _ in range(2):
        assert main(["report", str(folder.path), "--to", "tensorboard"]) == 0
    said = capsys.readouterr().out
    assert "11 points sent to tensorboard as r-replay\n" in said
    assert "11 points sent to tensorboard as r-replay-2\n" in said
    for name in ("-replay", "-replay-2"):
        found = tensorboard_scalars(folder.path / f"trackers/tensorboard{name}/r{name}")
        assert found["a/reward/mean"] == [(step, 1e9 + step, step / 8) for step in (1, 2, 3)]


class Paced(TrackerFeed):
    """A feed without a process, of which a look takes `LOOK_S` of its own clock; it ends after some looks."""

    LOOK_S = 100.0

    def __init__(self, *, takes: int, finishes: int = 10**9, ends: int = 10**9) -> None:
        """It takes a point a look, then nothing; `finishes` and `ends` are looks too."""
        self.num_taken = self.num_lost = self.looks = 0
        self._takes, self._finishes, self._ends = takes, finishes, ends
        self._is_finishing = False

    @property
    def now_s(self) -> float:
        """What its clock says."""
        return self.looks * self.LOOK_S

    def has_ended(self, timeout_s: float) -> bool:
        """Looks."""
        self.looks += 1
        self.num_taken = min(self._takes, self.looks)
        self._is_finishing = self.looks >= self._finishes
        return self.looks >= self._ends


@pytest.mark.parametrize(
    ("paced", "looks"),
    [
        (Paced(takes=50, ends=50), 50),
        (Paced(takes=50), 52),
        (Paced(takes=0), 3),
        (Paced(takes=9, finishes=10, ends=25), 25),
        (Paced(takes=9, finishes=10), 10 + 19),
    ],
    ids=["takes on", "takes no more", "takes nothing", "sends", "sends for ever"],
)
def test_a_replay_is_waited_for_as_long_as_it_gets_on(
    monkeypatch: pytest.MonkeyPatch, paced: Paced, looks: int
) -> None:
    """However long it takes in all: 120 s without a point, and half an hour for what it sends at its end."""
    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: paced.now_s))
    paced.await_end()
    assert paced.looks == looks


def test_a_tracker_that_has_all_points_is_finishing(tmp_path: Path) -> None:
    """From the end of its input on."""
    code = STARTS + "sys.stdin.read(); say('{}')"
    ending = feed(tmp_path, code)
    assert not ending._is_finishing
    ending.end()
    ending.await_end()
    assert (ending._is_finishing, ending.has_ended(BOUND_S)) == (True, True)
    ending.close()


def test_a_signal_to_the_whole_job_leaves_a_tracker_its_time(tmp_path: Path) -> None:
    """It goes on until the supervisor ends it."""
    needed("tensorboard")
    config = config_in(tmp_path, {"kind": "tensorboard"})
    fed = Trackers(config, create_run_folder(config), tmp_path)
    while not fed.take_lines():  # it has started
        assert not fed._feeds[0].has_ended(0.01)
    os.killpg(fed._feeds[0]._process.pid, signal.SIGTERM)
    fed.offer(record("a", 1, reward__mean=0.5))
    fed.close(BOUND_S)
    assert fed.values() == {"tracker/points/tensorboard": 1.0, "tracker/lost_points/tensorboard": 0.0}


def test_two_of_one_kind_have_names_of_their_own(tmp_path: Path) -> None:
    """So that neither goes on with the other's run."""
    config = config_in(tmp_path, *({"kind": kind} for kind in ("wandb", "trackio", "wandb")))
    assert [label for label, _ in trackers.labelled(config.trackers)] == ["wandb", "trackio", "wandb-2"]


def test_a_run_id_is_kept_for_its_project_alone(tmp_path: Path) -> None:
    """Another project begins a new run there."""
    file = RunFolder(tmp_path).path / "wandb.json"
    file.write_text(json.dumps({"kind": "wandb", "project": "mrl", "run_id": "x1"}))
    same, other = (config_in(tmp_path, {"kind": "wandb", "project": name}).trackers[0] for name in ("mrl", "new"))

    assert trackers._earlier_id(file, same) == "x1"
    assert trackers._earlier_id(file, other) == ""
    file.write_text("torn")
    assert trackers._earlier_id(file, same) == ""
    assert os.path.exists(file)


def test_the_example_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables, and its way to read numbers back."""
    needed("tensorboard")
    needed("trackio")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    toml, python, samples = re.findall(r"```(?:toml|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert config_in(tmp_path, *tomllib.loads(samples)["trackers"]).trackers[0].samples == 8
    config = config_in(tmp_path / "runs", *tomllib.loads(toml)["trackers"])
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": "mine"})})
    fed = Trackers(config, create_run_folder(config), tmp_path)
    fed.offer(record("qwen", 3, reward__mean=0.5))
    fed.close(BOUND_S)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python, {})
    assert printed.getvalue() == "0.5\n"
    assert [row[1:] for row in trackio_rows(tmp_path / "trackio/mutual.db")] == [("mine", 3, {"qwen/reward/mean": 0.5})]


def test_the_report_says_what_a_tracker_lost(tmp_path: Path) -> None:
    """The newest count."""
    folder = create_run_folder(config_in(tmp_path))
    writer = MetricsWriter(folder.metrics_jsonl)
    for lost in (0.0, 40.0):
        values = {"tracker/lost_points/wandb-2": lost, "tracker/lost_points/trackio": 0.0}
        writer.write(MetricsRecord(role="supervisor", policy="", step=1, time_unix_s=1.0 + lost, values=values))
    writer.close()

    told = "tracker wandb-2 lost 40 points; `mrl report RUN --to wandb` sends all points again"
    assert read_run(folder.path).problems == [told]
    assert told in write_report(folder.path).read_text(encoding="utf-8")
