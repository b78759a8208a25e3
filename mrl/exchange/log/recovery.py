"""What a folder of segments still holds when a daemon starts: entries, snapshot, and an account of what is damaged.

Three cases are kept apart. The end of the last segment is torn whenever a daemon is killed: it is cut off. Damage
anywhere else destroyed something that was written: the bytes go to `quarantine/`, are counted, and reading goes on at
the next whole frame. A file that cannot be read, or is of another format, is for a person to decide about.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mrl.errors import RunFolderError
from mrl.exchange.log.disk import Disk, write_all
from mrl.exchange.log.frames import (
    BLOCK_BYTES,
    END,
    ENTRY,
    FORMAT,
    HEADER,
    PREFIX_BYTES,
    Damage,
    Frame,
    FrameScan,
    format_of,
)

MAX_QUARANTINE_BYTES = 64 * 1024 * 1024
NEW_SEGMENT = "segment.new"
"""What becomes the next segment: half of it, or a released one that is to be written over. Nothing in it counts."""

_NAME = re.compile(r"(\d{20})-([0-9a-f]{16})\.segment")


class Segment(NamedTuple):
    """One file of the log. Offset and salt stand in its name, where damage to its content cannot reach them."""

    path: Path
    first_offset: int
    salt: int
    size_bytes: int
    header_bytes: int = 0
    """Length of what stands before the entries; of the last segment only."""

    @property
    def end_offset(self) -> int:
        """Absolute offset of the first byte after it."""
        return self.first_offset + self.size_bytes


def segment_path(folder: Path, first_offset: int, salt: int) -> Path:
    """Where the segment that begins at this offset lies."""
    return folder / f"{first_offset:020d}-{salt:016x}.segment"


def segment_at(path: Path) -> Segment | None:
    """The segment of this name; None when it is no segment's name, or the file is gone. Raises OSError."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return None
    return Segment(path, int(match[1]), int(match[2], 16), size_bytes)


def segments_in(folder: Path) -> list[Segment]:
    """The segments of a log, oldest first. Raises OSError."""
    found = [segment for path in folder.iterdir() if (segment := segment_at(path))]
    return sorted(found, key=lambda segment: segment.first_offset)


class Recovery:
    """Reads the segments of one folder, once and in order. The caller holds the folder's lock."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Raises RunFolderError when a file cannot be read or is of another format."""
        self.cut_bytes = 0
        """Length of the torn end of the last segment, and of what the file had behind it of an earlier life."""
        self.damaged = 0
        """Damaged or missing stretches elsewhere."""
        self.damaged_bytes = 0
        """Their length."""
        self.next_offset = 0
        """Where a log begins that has no usable segment left."""
        self._folder, self._disk = folder, disk
        self._quarantine = folder / "quarantine"
        with _readable(folder):
            _refuse_earlier_log(folder)
            (folder / NEW_SEGMENT).unlink(missing_ok=True)
            self.segments = segments_in(folder)
        for segment in self.segments:
            self._check_format(segment)
        self._set_aside_unusable_end()
        self.snapshot = self._snapshot_of(self.segments[0]) if self.segments else b""
        """What the header of the oldest segment carries."""

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """(absolute offset, payload) of every whole entry; afterwards the last segment ends with one, on the disk."""
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            yield from self._entries_of(segment)
            self._note_gap(segment, following)
        if self.segments:
            yield from self._entries_of_last(self.segments[-1])
        with _readable(self._folder):
            self._disk.sync_folder(self._folder)

    def _check_format(self, segment: Segment) -> None:
        with self._opened(segment, os.O_RDONLY) as file:
            number = format_of(self._disk.pread(file, PREFIX_BYTES, 0))
        if number not in (0, FORMAT):
            raise RunFolderError(
                "a log of another version of the exchange",
                where=str(segment.path),
                got=f"format {number}",
                wanted=f"format {FORMAT}",
                cure="use the version that wrote it, or move the folder away; the exchange starts empty then",
            )

    def _set_aside_unusable_end(self) -> None:
        """Move last segments without a single whole frame to the quarantine: nothing can be appended to them."""
        while self.segments and not self._has_frame(self.segments[-1]):
            segment = self.segments.pop()
            self.damaged += 1
            self.damaged_bytes += segment.size_bytes
            self.next_offset = max(self.next_offset, segment.end_offset)
            with _readable(segment.path):
                self._quarantine.mkdir(mode=0o700, exist_ok=True)
                self._disk.rename(segment.path, self._quarantine / segment.path.name)

    def _has_frame(self, segment: Segment) -> bool:
        with self._opened(segment, os.O_RDONLY) as file:
            return any(isinstance(item, Frame) for item in self._scan(file, segment))

    def _snapshot_of(self, segment: Segment) -> bytes:
        with self._opened(segment, os.O_RDONLY) as file:
            for item in self._scan(file, segment):
                if isinstance(item, Frame):
                    return item.payload if item.kind == HEADER else b""
        return b""

    def _entries_of(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        with self._opened(segment, os.O_RDONLY) as file:
            for item in self._scan(file, segment):
                if isinstance(item, Damage):
                    self._note_damage(file, segment, item)
                elif item.kind == ENTRY:
                    yield segment.first_offset + item.position, item.payload

    def _entries_of_last(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        with self._opened(segment, os.O_RDWR) as file:
            # What a killed daemon wrote and did not sync must be on the disk before anybody hears that it is here. And
            # what an earlier fsync failed to write may still be in the page cache, where it looks as if it were.
            self._disk.fdatasync(file)
            self._disk.forget_cached(file)
            for item in self._scan(file, segment):
                if isinstance(item, Frame) and item.kind == ENTRY:
                    yield segment.first_offset + item.position, item.payload
                elif isinstance(item, Frame) and item.kind == END:
                    self._cut(file, item.position)
                elif isinstance(item, Frame):
                    self.segments[-1] = segment._replace(header_bytes=item.end)
                elif item.end < segment.size_bytes:
                    self._note_damage(file, segment, item)
                else:
                    self._cut(file, item.position)
                    self.cut_bytes = item.end - item.position

    def _cut(self, file: int, size_bytes: int) -> None:
        self._disk.ftruncate(file, size_bytes)
        self._disk.fdatasync(file)
        self.segments[-1] = self.segments[-1]._replace(size_bytes=size_bytes)

    def _scan(self, file: int, segment: Segment) -> FrameScan:
        def read_at(length: int, position: int) -> bytes:
            return self._disk.pread(file, length, position)

        return FrameScan(read_at, size_bytes=segment.size_bytes, first_offset=segment.first_offset, salt=segment.salt)

    @contextlib.contextmanager
    def _opened(self, segment: Segment, flags: int) -> Iterator[int]:
        with _readable(segment.path):
            file = self._disk.open(segment.path, flags)
            try:
                yield file
            finally:
                self._disk.close(file)

    def _note_gap(self, segment: Segment, following: Segment) -> None:
        missing = following.first_offset - segment.end_offset
        if missing > 0:
            self.damaged += 1
            self.damaged_bytes += missing

    def _note_damage(self, file: int, segment: Segment, damage: Damage) -> None:
        self.damaged += 1
        self.damaged_bytes += damage.end - damage.position
        # A full disk is no reason to stop: the bytes stay where they are until their segment is released.
        with contextlib.suppress(OSError):
            self._copy_out(file, segment, damage)

    def _copy_out(self, file: int, segment: Segment, damage: Damage) -> None:
        self._quarantine.mkdir(mode=0o700, exist_ok=True)
        held = sum(path.stat().st_size for path in self._quarantine.iterdir())
        target = self._quarantine / f"{segment.first_offset + damage.position:020d}.damaged"
        if target.exists() or held + damage.end - damage.position > MAX_QUARANTINE_BYTES:
            return
        copy = self._disk.open(target, os.O_WRONLY | os.O_CREAT)
        try:
            for start in range(damage.position, damage.end, BLOCK_BYTES):
                block = self._disk.pread(file, min(BLOCK_BYTES, damage.end - start), start)
                write_all(self._disk, copy, [block], start - damage.position)
        except OSError:
            target.unlink()
            raise
        finally:
            self._disk.close(copy)


def _refuse_earlier_log(folder: Path) -> None:
    if (folder / "log").exists():
        cure = "move the file away; the exchange starts empty then"
        raise RunFolderError("a log of an earlier version of the exchange", where=str(folder / "log"), cure=cure)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one line about `path`."""
    try:
        yield
    except OSError as error:
        cure = "make it usable for this account, or move it away; what it holds is lost then"
        raise RunFolderError(
            f"cannot use the exchange's log ({error.strerror or error})", where=str(path), cure=cure
        ) from error
