"""`residuals/<policy>.jsonl`: what became of the answers of its peers, a line each, the policy the receiver.

A file that has outgrown its bound keeps every second step, whole, and takes only such steps from then on; the next time
every fourth, and so on. What is left is spread evenly over the run. Such a file begins with {"every_steps": n}; the
metrics `align/rows/{source}` count the answers of all steps.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mrl.files import replace_file
from mrl.metrics.jsonl import OnDamage, append_lines, damaged_lines, file_of, keep_silent, parse_line
from mrl.records.telemetry_messages import ResidualsRecord

MAX_BYTES = 64 * 1024 * 1024
"""About 100,000 answers per receiver."""
CHUNK_BYTES = 1024 * 1024
STEP = re.compile(rb'\{"step":(\d+),')
EVERY_STEPS = re.compile(rb'\{"every_steps":([1-9]\d*)\}\n')


class ResidualWriter:
    """Appends lines {"step", "source", "prompt_id", ...}; a file ends with at most one record beyond `max_bytes`."""

    def __init__(self, residuals: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._residuals, self._max_bytes = residuals, max_bytes
        self._every_steps: dict[Path, int] = {}

    def write(self, record: ResidualsRecord) -> Path:
        """Append the lines of one record at once, or nothing for a step that is left out, and return the file.

        Raises RecordError for a policy that is no plain file name, OSError when the disk is full.
        """
        path = file_of(self._residuals, record.policy)
        if path not in self._every_steps:
            self._every_steps[path] = every_steps(path)
        if record.step % self._every_steps[path] == 0:
            append_lines(path, [{"step": record.step} | msgspec.structs.asdict(row) for row in record.rows])
            if path.stat().st_size > self._max_bytes:
                self._every_steps[path] *= 2
                _thin(path, self._every_steps[path])
        return path


def every_steps(path: Path) -> int:
    """The file holds steps that are multiples of this; 1 for all, and for a file that does not exist."""
    if not path.exists():
        return 1
    with path.open("rb") as file:
        found = EVERY_STEPS.match(file.readline(64))
    return int(found[1]) if found else 1


def residual_files(residuals: Path) -> dict[str, Path]:
    """Policy -> its file, by name."""
    return {path.stem: path for path in sorted(residuals.glob("*.jsonl"))}


def standing_lines(path: Path, on_damage: OnDamage = keep_silent) -> Iterator[dict[str, Any]]:
    """The lines of one file from the last to the first, without those of steps that a resume took back.

    Read from the end a step never rises: a line stands while its step is the lowest so far. Memory does not grow with
    the file. A torn last line and damaged lines are left out.
    """
    lowest, current, stands = math.inf, None, False
    for line in _lines_from_end(path, on_damage):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        if step != current:
            current, stands = step, step < lowest
            lowest = min(lowest, step)
        if stands:
            yield line


def _thin(path: Path, every: int) -> None:
    with path.open("rb") as file:
        kept = [row for row in file if (step := STEP.match(row)) and int(step[1]) % every == 0]
    replace_file(path, b"".join([b'{"every_steps":%d}\n' % every, *kept]))


def _lines_from_end(path: Path, on_damage: OnDamage) -> Iterator[dict[str, Any]]:
    first_bad = num_bad = 0
    with path.open("rb") as file:
        for start, row in _rows_from_end(file):
            line = parse_line(row)
            if line is None:
                first_bad, num_bad = start, num_bad + 1
            else:
                yield line
        if num_bad:
            on_damage(damaged_lines(path, _newlines_before(file, first_bad) + 1, num_bad))


def _rows_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(Place of its first byte, row without its newline), last row first; what follows the last newline is left out."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start:
        end, start = start, max(0, start - CHUNK_BYTES)
        file.seek(start)
        data = file.read(end - start) + rest
        cut = data.find(b"\n") + 1 if start else 0
        if start and not cut:
            rest = data
            continue
        rest, place = data[:cut], start + len(data)
        *rows, torn = data[cut:].split(b"\n")
        place -= len(torn)
        for row in reversed(rows):
            place -= len(row) + 1
            yield place, row


def _newlines_before(file: BinaryIO, place: int) -> int:
    file.seek(0)
    chunks = iter(lambda: file.read(min(CHUNK_BYTES, place - file.tell())), b"")
    return sum(chunk.count(b"\n") for chunk in chunks)
