"""Files of JSON lines."""

import json
import math
import resource
import signal
import tracemalloc
from pathlib import Path

import pytest

from mrl.errors import RecordError
from mrl.metrics.jsonl import MetricsWriter, SampleWriter, each_metrics, read_samples, sample_stride
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord


def metrics(step: int = 1, **values: float) -> MetricsRecord:
    return MetricsRecord(role="learner/qwen", policy="qwen", step=step, time_unix_s=10.0, values=values)


def beat(time_unix_s: float, role: str = "learner/qwen", pid: int = 1) -> HeartbeatRecord:
    return HeartbeatRecord(
        role=role,
        policy="qwen",
        pid=pid,
        time_unix_s=time_unix_s,
        doing="training",
        awaiting="groups",
        whom="worker/qwen/0",
        for_s=1.5,
        bound_s=300.0,
    )


def sample(policy: str = "qwen", step: int = 3, completion: str = "yah") -> SampleRecord:
    return SampleRecord(
        policy=policy, step=step, kind="rollout", task="spell", prompt="hay", completion=completion, reward=1.0
    )


def test_metrics_line_has_exactly_the_agreed_keys(tmp_path: Path) -> None:
    """A metrics record becomes one flushed line with time, role, policy, step and values."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(metrics(2, a=0.5))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {
        "time_unix_s": 10.0,
        "role": "learner/qwen",
        "policy": "qwen",
        "step": 2,
        "values": {"a": 0.5},
    }
    assert line.endswith("\n")
    writer.close()


def test_non_finite_values_are_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    """NaN and infinity leave every line valid JSON."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(metrics(1, a=math.nan, b=math.inf, c=1.0))
    writer.close()
    assert '"a":null,"b":null,"c":1.0' in path.read_text()
    values = next(each_metrics(path))["values"]
    assert math.isnan(values["a"])
    assert math.isnan(values["b"])
    assert values["c"] == 1.0


def test_heartbeats_are_written_at_most_once_per_interval_and_role(tmp_path: Path) -> None:
    """Within 30 s only the first heartbeat of a role is kept; another role, or a new pid, is not held back."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for record in (beat(0), beat(29.9), beat(30.0), beat(31, role="exchange"), beat(32, pid=2), beat(33, pid=2)):
        writer.write(record)
    writer.close()
    lines = list(each_metrics(path))
    assert [(line["time_unix_s"], line["role"]) for line in lines] == [
        (0, "learner/qwen"),
        (30.0, "learner/qwen"),
        (31, "exchange"),
        (32, "learner/qwen"),
    ]
    assert lines[0]["heartbeat"] == {
        "pid": 1,
        "doing": "training",
        "awaiting": "groups",
        "whom": "worker/qwen/0",
        "for_s": 1.5,
        "bound_s": 300.0,
    }
    assert "values" not in lines[0]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """Reading tolerates what a killed writer left behind, even cut inside a character."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"policy":"\xc3')
    assert [line["step"] for line in each_metrics(path)] == [1, 2]


def test_writing_after_a_torn_line_cuts_it_off(tmp_path: Path) -> None:
    """A resumed run never glues its first line to the torn end of the last one."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":')
    writer = MetricsWriter(path)
    writer.write(metrics(2))
    writer.close()
    assert [line["step"] for line in each_metrics(path)] == [1, 2]


def test_a_file_that_is_only_a_torn_line_starts_empty(tmp_path: Path) -> None:
    """Nothing whole was written, so nothing is kept."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"ste')
    assert list(each_metrics(path)) == []
    MetricsWriter(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("row", [b"{broken", b"[1]", b"\xff\xfe", b"", bytes(512), b"[" * 200_000])
def test_a_damaged_line_in_the_middle_costs_itself_alone(tmp_path: Path, row: bytes) -> None:
    """It is left out and named, and the next attempt writes on behind it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + row + b'\n{"step":3}\n' + row + b"\n")
    told: list[str] = []
    assert [line["step"] for line in each_metrics(path, told.append)] == [1, 3]
    assert told == [f"{path}:2: skipped 2 damaged lines, the first of them here"]
    writer = MetricsWriter(path)
    writer.write(metrics(4))
    writer.close()
    assert [line["step"] for line in each_metrics(path)] == [1, 3, 4]


@pytest.mark.parametrize("tail", [bytes(4096), b'{"step"' + bytes(9)])
def test_a_tail_that_a_power_cut_left_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    """A file system may keep the length of what was never written: zeros, alone or behind half a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + tail)
    assert [line["step"] for line in each_metrics(path)] == [1]
    MetricsWriter(path).close()
    assert path.read_bytes() == b'{"step":1}\n'


def test_the_end_of_a_long_file_is_cut_off_without_reading_it_into_memory(tmp_path: Path) -> None:
    """Whatever is torn, and modes stay."""
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step":1,"text":"' + b"x" * 100_000 + b'"}\n'
    for torn in (b'{"torn"', b"", bytes(200_000)):
        path.write_bytes(whole * 201 + torn)
        path.chmod(0o640)
        tracemalloc.start()
        MetricsWriter(path).close()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (path.stat().st_size, path.stat().st_mode & 0o777) == (201 * len(whole), 0o640)
        assert most < 2_000_000


def test_lines_behind_zeros_are_read_and_the_next_attempt_writes_on(tmp_path: Path) -> None:
    """Zeros in the middle, and lines that reached the disk behind them."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + bytes(4096) + b'"half":1}\n{"step":3}\n' + bytes(100))
    writer = MetricsWriter(path)
    writer.write(metrics(4))
    writer.close()
    assert [line["step"] for line in each_metrics(path)] == [1, 3, 4]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    """A run that has not begun has no metrics."""
    assert list(each_metrics(tmp_path / "metrics.jsonl")) == []


def test_samples_are_filed_by_step_and_policy_and_read_in_order(tmp_path: Path) -> None:
    """Steps order as numbers, and text that is no valid unicode is kept escaped."""
    writer = SampleWriter(tmp_path)
    assert writer.write(sample(step=10)) == tmp_path / "step_10" / "qwen.jsonl"
    writer.write(sample(step=9, completion="line\nbreak \u2028 \udc80"))
    writer.write(sample("llama", step=9))
    read = read_samples(tmp_path)
    assert [(line["step"], line["policy"]) for line in read] == [(9, "llama"), (9, "qwen"), (10, "qwen")]
    assert read[1]["completion"] == "line\nbreak \u2028 \udc80"


def test_samples_of_a_long_run_stay_few(tmp_path: Path) -> None:
    """All of the first thousand steps, then fewer and fewer of those that come with every step; of others all."""
    writer = SampleWriter(tmp_path)
    assert [step for step in range(1, 20_000, 7) if writer.write(sample(step=step))] == [
        *range(1, 1024, 7),
        *(step for step in range(1030, 20_000, 7) if step % sample_stride(step) == 0),
    ]
    assert sum(step % sample_stride(step) == 0 for step in range(1, 100_001)) < 5000
    assert [sample_stride(step) for step in (1023, 1024, 2047, 2048, 99_999)] == [1, 2, 2, 4, 128]
    unjudged = SampleRecord(policy="qwen", step=99_999, kind="unjudged", task="t", prompt="", completion="", reward=0)
    assert writer.write(unjudged) == tmp_path / "step_99999" / "qwen.jsonl"


def test_a_sample_finds_its_folder_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who thins out the answers of its steps removes a folder that is empty, in whichever moment."""
    made = Path.mkdir

    def made_and_removed(path: Path, *how: bool, **more: bool) -> None:
        made(path, *how, **more)
        monkeypatch.setattr(Path, "mkdir", made)
        path.rmdir()

    monkeypatch.setattr(Path, "mkdir", made_and_removed)
    path = SampleWriter(tmp_path).write(sample())
    assert path is not None
    assert path.exists()


def test_many_lines_share_the_names_of_their_values(tmp_path: Path) -> None:
    """A report holds the values of every step: 100 names of 100,000 steps would be gigabytes."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2):
        writer.write(metrics(step, **{"reward/mean of a step": 0.5}))
    writer.close()
    (first,), (second,) = (line["values"] for line in each_metrics(path))
    assert first is second


@pytest.mark.parametrize("policy", ["../qwen", "a/b", "..", "."])
def test_a_policy_name_cannot_leave_the_folder(tmp_path: Path, policy: str) -> None:
    """A sample whose policy is no plain name is refused and writes nothing."""
    with pytest.raises(RecordError, match="policy"):
        SampleWriter(tmp_path / "rollouts").write(sample(policy))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """When a line cannot be written whole, what was written of it is taken back."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(metrics(1))
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write(metrics(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == size
    writer.write(metrics(3))
    writer.close()
    assert [line["step"] for line in each_metrics(path)] == [1, 3]
