"""The log as a reader of the same host sees it: bytes at a place, while the daemon goes on writing behind them.

What the daemon has told the place of is whole and never changes; its segment may be deleted once it was written anew.
"""

import os
from bisect import bisect_right
from pathlib import Path

from mrl.exchange.log.recovery import segments_in

MAX_OPEN = 16


class Places:
    """Reads from the segments in one folder. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[int, Path] = {}
        self._firsts: list[int] = []
        self._files: dict[int, int] = {}

    def read(self, place: int, num_bytes: int) -> bytes | None:
        """What stands at this absolute offset; None when it cannot be read (any more)."""
        found = self._read(place, num_bytes)
        if found is None:
            self._look()
            found = self._read(place, num_bytes)
        return found

    def close(self) -> None:
        """Forget what was seen of the folder."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._firsts = []

    def _read(self, place: int, num_bytes: int) -> bytes | None:
        index = bisect_right(self._firsts, place) - 1
        if index < 0:
            return None
        first = self._firsts[index]
        try:
            data = os.pread(self._file(first), num_bytes, place - first)
        except OSError:
            return None
        return data if len(data) == num_bytes else None

    def _look(self) -> None:
        try:
            segments = segments_in(self._folder)
        except OSError:
            segments = []
        self._paths = {segment.first_offset: segment.path for segment in segments}
        self._firsts = sorted({*self._paths, *self._files})

    def _file(self, first: int) -> int:
        if first not in self._files:
            self._files[first] = os.open(self._paths[first], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > MAX_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
        return self._files[first]
