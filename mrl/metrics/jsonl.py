"""`metrics.jsonl` and `rollouts/step_N/<policy>.jsonl`: one JSON object per line, one writer.

A line is written with one system call. A tail that a killed writer or a power cut left torn or full of zeros is cut
off before anything is appended, and readers skip it. Any other line that holds no object is damage: readers leave it
out and report it. Values that are no finite number are stored as null, which keeps every line valid JSON, and read back
as NaN.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mrl.errors import RecordError
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord

HEARTBEAT_EVERY_S = 30.0
BLOCK_BYTES = 64 * 1024
"""Bytes read at once from the end of a file, which may be longer than memory."""
OF_EVERY_STEP = ("rollout", "rescue")
"""Kinds of samples that a learner emits at each of its steps."""
ALL_STEPS = 1024
"""First steps of a run that all have samples on the disk."""
T = TypeVar("T")
OnDamage = Callable[[str], object]
"""Called once per damaged file, with a text on the number of lines left out and the place of the first."""


def keep_silent(_what: str) -> None:
    """Ignore a report of damaged lines."""


class MetricsWriter:
    """Appends to `metrics.jsonl`.

    Metrics make lines {"time_unix_s", "role", "policy", "step", "values"}. Heartbeats make lines
    {"time_unix_s", "role", "policy", "heartbeat"}, at most one per role in `HEARTBEAT_EVERY_S`; the first heartbeat of
    a new process of the role is written at once.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open_for_append(path)
        self._last_beat: dict[tuple[str, str], HeartbeatRecord] = {}

    def write(self, record: MetricsRecord | HeartbeatRecord) -> None:
        """Append one line, or nothing for a heartbeat that is too soon.

        Raises OSError when the disk is full; a half-written line is removed first.
        """
        line: dict[str, Any] = {"time_unix_s": record.time_unix_s, "role": record.role, "policy": record.policy}
        if isinstance(record, MetricsRecord):
            line |= {"step": record.step, "values": record.values}
        else:
            if not self._is_due(record):
                return
            parts = ("pid", "doing", "awaiting", "whom", "for_s", "bound_s")
            line["heartbeat"] = {name: getattr(record, name) for name in parts}
        _append(self._file, line)

    def close(self) -> None:
        """Make the file durable and close it."""
        os.fsync(self._file)
        os.close(self._file)

    def _is_due(self, beat: HeartbeatRecord) -> bool:
        last = self._last_beat.get((beat.role, beat.policy))
        if last and last.pid == beat.pid and 0 <= beat.time_unix_s - last.time_unix_s < HEARTBEAT_EVERY_S:
            return False
        self._last_beat[beat.role, beat.policy] = beat
        return True


class SampleWriter:
    """Appends answers for people to read to `rollouts/step_N/<policy>.jsonl`.

    Samples that come with every step are left out at some steps, at more of them the longer a run lasts: otherwise
    there would be hundreds of thousands of files, and a reader of all files, such as the report, would need gigabytes.
    """

    def __init__(self, rollouts: Path) -> None:
        self._rollouts = rollouts

    def write(self, sample: SampleRecord) -> Path | None:
        """Append one line and return the file; None for a sample that is left out.

        Raises RecordError for a policy that is no plain file name, OSError when the disk is full.
        """
        if sample.kind in OF_EVERY_STEP and sample.step % sample_stride(sample.step):
            return None
        path = file_of(self._rollouts / f"step_{sample.step}", sample.policy)
        line = {name: getattr(sample, name) for name in SampleRecord.__struct_fields__}
        append_lines(path, [line | {"turns": msgspec.to_builtins(sample.turns)}])
        return path


def sample_stride(step: int) -> int:
    """Return n: around `step` every n-th step has samples on the disk. n is 1 below 1,024, then 2, 4, and so on."""
    return 1 << (step // ALL_STEPS).bit_length()


def each_metrics(path: Path, on_damage: OnDamage = keep_silent) -> Iterator[dict[str, Any]]:
    """Yield all lines of a metrics file, in order; numbers that were not finite are NaN.

    A file that does not exist is empty. A torn last line and damaged lines are left out. Memory does not grow with the
    file, which after days may be longer than free memory.
    """
    for line in sound_lines(path, parse_line, on_damage):
        if isinstance(line.get("values"), dict):  # a name is in memory once, for all lines that a caller keeps
            values = line["values"].items()
            line["values"] = {sys.intern(name): math.nan if value is None else value for name, value in values}
        yield line


def read_tail(path: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the whole, sound lines among the last `max_bytes` of a file. Raises OSError."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
        file.seek(start)
        rows = file.read().split(b"\n")[1 if start else 0 : -1]
    return [line for row in rows if (line := parse_line(row)) is not None]


def read_samples(rollouts: Path, on_damage: OnDamage = keep_silent) -> list[dict[str, Any]]:
    """Return all samples under a `rollouts` folder, ordered by step, then policy, then time of writing."""
    paths = [path for path in rollouts.glob("step_*/*.jsonl") if path.parent.name.removeprefix("step_").isdecimal()]
    paths.sort(key=lambda path: (int(path.parent.name.removeprefix("step_")), path.name))
    return [line for path in paths for line in sound_lines(path, parse_line, on_damage)]


def file_of(folder: Path, policy: str) -> Path:
    """Return `<folder>/<policy>.jsonl`. Raises RecordError for a policy that is no plain file name."""
    if policy != Path(policy).name or policy in {"", ".", ".."} or "\0" in policy:
        raise RecordError(f"policy: {policy!r} is not a plain file name")
    return folder / f"{policy}.jsonl"


def append_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Append all lines at once, to a file and folder that are made if missing. Raises OSError when the disk is full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = _open_for_append(path)
    except FileNotFoundError:  # another process has just removed the folder, which was empty
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_for_append(path)
    try:
        _append(file, *lines)
    finally:
        os.close(file)


def parse_line(row: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None when the line holds no object."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _open_for_append(path: Path) -> int:
    """Open `path`, made if missing, and cut it off after its last whole line; return the descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    end = os.lseek(file, 0, os.SEEK_END)
    if end and os.pread(file, 1, end - 1) != b"\n":
        os.ftruncate(file, _whole_bytes(file, end))
    return file


def _whole_bytes(file: int, end: int) -> int:
    """Return the end of the last whole line before `end`; reads no more than the blocks that follow it."""
    while end:
        start = max(0, end - BLOCK_BYTES)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _append(file: int, *lines: dict[str, Any]) -> None:
    texts = (json.dumps(_finite(line), ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    data = "".join(texts).encode("utf-8", "backslashreplace")
    start = os.lseek(file, 0, os.SEEK_END)
    try:
        written = 0
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        os.ftruncate(file, start)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sound_lines(path: Path, parse: Callable[[bytes], T | None], on_damage: OnDamage) -> Iterator[T]:
    """Yield what `parse` makes of the lines of a file, in order; none of a file that does not exist.

    Memory does not grow with the file. A torn last line is left out, and so are lines of which `parse` makes None:
    `on_damage` is told of these.
    """
    if not path.exists():
        return
    first_bad = num_bad = 0
    with path.open("rb") as file:
        for number, row in enumerate(file, start=1):
            if not row.endswith(b"\n"):  # torn
                break
            line = parse(row)
            if line is not None:
                yield line
            else:
                first_bad, num_bad = first_bad or number, num_bad + 1
    if num_bad:
        lines = "skipped a damaged line" if num_bad == 1 else f"skipped {num_bad} damaged lines, the first of them here"
        on_damage(f"{path}:{first_bad}: {lines}")
