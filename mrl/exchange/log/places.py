"""The log as a reader of the same host sees it: bytes at a place, while the daemon goes on writing behind them.

What the daemon has told the place of is whole and does not change while its segment has its name. Once it was written
anew, or is needed no more, the file may be gone or be written over under another name. So the name is looked at after
every read: what was read under a name that is still there is what was asked for.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from mrl.exchange.log.recovery import Segment, segments_in

MAX_OPEN = 16


class Places:
    """Reads from the segments in one folder. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []
        self._firsts: list[int] = []
        """Where they begin."""
        self._files: dict[Path, int] = {}

    def read(self, place: int, num_bytes: int) -> bytes | None:
        """What stands at this absolute offset; None when it cannot be read (any more)."""
        found = self._read(place, num_bytes)
        if found is None:
            self._look()
            found = self._read(place, num_bytes)
        return found

    def close(self) -> None:
        """Forget what was seen of the folder."""
        self._know([])

    def _read(self, place: int, num_bytes: int) -> bytes | None:
        index = bisect_right(self._firsts, place) - 1
        if index < 0:
            return None
        path = self._paths[index]
        try:
            data = os.pread(self._file(path), num_bytes, place - self._firsts[index])
            return data if len(data) == num_bytes and path.exists() else None
        except OSError:
            return None

    def _look(self) -> None:
        try:
            self._know(segments_in(self._folder))
        except OSError:
            self._know([])

    def _know(self, segments: Sequence[Segment]) -> None:
        self._paths = [segment.path for segment in segments]
        self._firsts = [segment.first_offset for segment in segments]
        for gone in self._files.keys() - set(self._paths):
            os.close(self._files.pop(gone))

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
        return self._files[path]
