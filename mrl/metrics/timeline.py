"""`timeline.jsonl`: activities and waits of every role, a line per span.

A file that has outgrown its bound keeps every second minute, whole, and takes only spans of such minutes from then on;
the next time it keeps every fourth minute, and so on. Minutes are those of unix time, and a span belongs to the minute
in which it began. Such a file begins with {"every_minutes": n}.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mrl.files import replace_file
from mrl.metrics.jsonl import OnDamage, append_lines, keep_silent, sound_lines
from mrl.records.telemetry_messages import Span, SpansRecord

MAX_BYTES = 64 * 1024 * 1024
"""About 600,000 spans."""
MINUTE_S = 60
BEGAN = re.compile(rb'\{"began_unix_s":(\d+)')
EVERY_MINUTES = re.compile(rb'\{"every_minutes":([1-9]\d*)\}\n')


class FiledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span on a line of the file; see `Span`. Fields that are empty or false are left out of the line."""

    began_unix_s: float
    duration_s: float
    role: str
    kind: str
    whom: str = ""
    is_wait: bool = False
    is_beside: bool = False

    @property
    def ended_unix_s(self) -> float:
        """Unix time of the end, in seconds."""
        return self.began_unix_s + self.duration_s


_line_decoder = msgspec.json.Decoder(FiledSpan)


class TimelineWriter:
    """Appends lines {"began_unix_s", "duration_s", "role", "kind", ...}, at most one record beyond `max_bytes`."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._every_minutes = 0

    def write(self, record: SpansRecord) -> None:
        """Append the spans of one record at once, without spans of minutes that are left out.

        Raises OSError when the disk is full.
        """
        if not self._every_minutes:
            self._every_minutes = every_minutes(self._path)
        lines = [_line(record.role, span) for span in record.spans if self._is_kept(span)]
        if not lines:
            return
        append_lines(self._path, lines)
        if self._path.stat().st_size > self._max_bytes:
            self._every_minutes *= 2
            _thin(self._path, self._every_minutes)

    def _is_kept(self, span: Span) -> bool:
        return is_kept(span.began_unix_s, self._every_minutes)


def is_kept(time_unix_s: float, every: int) -> bool:
    """Whether a file that keeps one minute of `every` keeps the minute of this time."""
    return int(time_unix_s) // MINUTE_S % every == 0


def every_minutes(path: Path) -> int:
    """Return n: the file holds the minutes that are multiples of n. 1 for all minutes and for a missing file."""
    if not path.exists():
        return 1
    with path.open("rb") as file:
        found = EVERY_MINUTES.match(file.readline(64))
    return int(found[1]) if found else 1


def read_timeline(path: Path, on_damage: OnDamage = keep_silent) -> Iterator[FiledSpan]:
    """Return an iterator over all spans, in the order of writing; none of a file that does not exist.

    Memory does not grow with the file. A torn last line, and lines that hold no span, are left out.
    """
    return (line for line in sound_lines(path, _parsed, on_damage) if isinstance(line, FiledSpan))


def _parsed(row: bytes) -> FiledSpan | bytes | None:
    """Return the span on a line, or the line itself where it tells which minutes the file holds; else None."""
    try:
        return _line_decoder.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return row if EVERY_MINUTES.match(row) else None


def _line(role: str, span: Span) -> dict[str, Any]:
    times = {"began_unix_s": round(span.began_unix_s, 4), "duration_s": round(span.duration_s, 4)}
    more = {name: value for name in ("whom", "is_wait", "is_beside") if (value := getattr(span, name))}
    return times | {"role": role, "kind": span.kind} | more


def _thin(path: Path, every: int) -> None:
    with path.open("rb") as file:
        kept = [row for row in file if (began := BEGAN.match(row)) and is_kept(int(began[1]), every)]
    replace_file(path, b"".join([b'{"every_minutes":%d}\n' % every, *kept]))
