"""The log that outlives the daemon: what it accepted, in order, in a folder of segments.

A segment is one file, named by the absolute offset at which it begins, and never changed before its end. Its header
carries the daemon's snapshot at that point, so that the segments before it can go without taking memory with them that
is still needed. Offsets count bytes from the first byte that this log ever wrote; they survive a restart and the
deletion of old segments.

A file that is released waits under another name until it is written over as the next segment: its blocks on the disk
and its pages in memory are there already, so that neither has to be found while producers wait.

What `append` has returned survives the death of the process with `written`, and that of the host with `synced`.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, ParamSpec

from mrl.errors import DiskBroken, DiskFull, RunFolderError
from mrl.exchange.log.disk import NO_ROOM, Disk, write_all
from mrl.exchange.log.frames import END, ENTRY, HEAD_BYTES, HEADER, MAX_PAYLOAD_BYTES, PREFIX_BYTES, head, prefix
from mrl.exchange.log.recovery import NEW_SEGMENT, Recovery, Segment, segment_path
from mrl.records.codec import Buffer

Durability = Literal["synced", "written"]

SEGMENT_BYTES = 64 * 1024 * 1024

Payload = Sequence[Buffer]
"""What an entry consists of, in parts that are written one behind the other."""

P = ParamSpec("P")


class SegmentLog:
    """The log in one folder, for one daemon at a time. `replay` is read to its end before anything else is done.

    Not safe for several threads, except that any thread may read the properties.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        durability: Durability,
        segment_bytes: int = SEGMENT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        """Take the folder and read the headers.

        `segment_bytes` is when `wants_roll` asks for a new segment; `max_bytes`, at least twice as much, is never
        exceeded by all files together. One segment's worth of it is the reserve: see `append`.
        Raises RunFolderError when the folder cannot be used, another daemon uses it, or its format is another one.
        """
        if max_bytes < 2 * segment_bytes:
            raise ValueError(f"max_bytes is {max_bytes}, and two segments need {2 * segment_bytes}")
        self.num_syncs = 0
        """How often an append or a roll waited for the disk."""
        self.sync_s = 0.0
        """Seconds it waited, in all."""
        self.last_sync_s = 0.0
        """Seconds it waited the last time."""
        self._folder, self._disk = folder, disk or Disk()
        self._segment_bytes, self._max_bytes, self._durability = segment_bytes, max_bytes, durability
        # Replaced as a whole, so that another thread never sees a half of a change.
        self._segments: tuple[Segment, ...] = ()
        self._file = -1
        self._old_end = 0
        """Where the bytes of an earlier life end in the last segment's file; the segment itself may be longer."""
        self._spare_bytes = 0
        """Length of the released file that waits to be the next segment."""
        self._is_broken = False
        self._lock = _lock(folder)
        try:
            self._recovery = Recovery(folder, self._disk)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def snapshot(self) -> bytes:
        """What the header of the oldest segment carried when the log was opened; empty when there was nothing."""
        return self._recovery.snapshot

    @property
    def cut_bytes(self) -> int:
        """Length of what the replay cut off as torn: at most so much was being written, or is of an earlier life."""
        return self._recovery.cut_bytes

    @property
    def damaged(self) -> int:
        """Stretches inside the log that were damaged or missing at the replay; their bytes are in `quarantine/`."""
        return self._recovery.damaged

    @property
    def damaged_bytes(self) -> int:
        """Length of the damaged and missing stretches."""
        return self._recovery.damaged_bytes

    @property
    def first_offset(self) -> int:
        """Where the oldest segment begins."""
        return self._replayed()[0].first_offset

    @property
    def second_offset(self) -> int:
        """Where the second segment begins; of a single segment, which is never released, its own begin."""
        return self._replayed()[:2][-1].first_offset

    @property
    def end_offset(self) -> int:
        """Where the next entry will stand."""
        return self._replayed()[-1].end_offset

    @property
    def size_bytes(self) -> int:
        """Length of all segments together."""
        return sum(segment.size_bytes for segment in self._replayed())

    @property
    def tail_bytes(self) -> int:
        """Length of the entries in the last segment."""
        tail = self._replayed()[-1]
        return tail.size_bytes - tail.header_bytes

    @property
    def wants_roll(self) -> bool:
        """Whether the last segment has its length."""
        return self.tail_bytes >= self._segment_bytes

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """(absolute offset, payload) of every entry, in the order of writing.

        Raises RunFolderError when a file cannot be read, or the log cannot be made ready for appending.
        """
        yield from self._recovery.entries()
        try:
            self._open_tail()
        except (OSError, DiskFull, DiskBroken) as error:
            raise RunFolderError(f"cannot begin the exchange's log ({error})", where=str(self._folder)) from error

    def append(self, payloads: Sequence[Payload], *, into_reserve: bool = False) -> list[int]:
        """Write all payloads or none, each given in parts; returns their offsets.

        `into_reserve` may use the last part of `max_bytes`: it is for entries that are written anew so that the
        segment which holds them can be released.
        Raises DiskFull, after which it may be tried again, or DiskBroken, after which the log takes nothing more.
        """
        if not payloads:
            return []
        offsets, buffers = self._framed(payloads)
        *earlier, tail = self._replayed()
        num_bytes = sum(map(len, buffers))
        self._demand_room(num_bytes, self._max_bytes - (0 if into_reserve else self._segment_bytes))
        longer = tail._replace(size_bytes=tail.size_bytes + num_bytes)
        buffers += self._end_mark(longer)
        try:
            write_all(self._disk, self._file, buffers, tail.size_bytes)
        except OSError as error:
            # Without the cut, a shorter group in the place of this one would leave whole frames of it behind itself.
            self._cut_tail()
            if error.errno in NO_ROOM and self._drop_spare():
                return self.append(payloads, into_reserve=into_reserve)
            raise self._failure(error) from error
        if self._durability == "synced":
            self._sync(self._file)
        self._segments = (*earlier, longer)
        return offsets

    def roll(self, snapshot: bytes) -> None:
        """Begin a new segment whose header carries `snapshot`: what a daemon must know besides the entries after it.

        Raises DiskFull, after which the old segment goes on, or DiskBroken.
        """
        segments = self._replayed()
        self._demand_room(PREFIX_BYTES + HEAD_BYTES + len(snapshot), self._max_bytes)
        self._cut_old_end()
        self._sync(self._file)
        tail, file = self._create(segments[-1].end_offset, snapshot)
        self._disk.close(self._file)
        self._file, self._segments = file, (*segments, tail)

    def release(self, before_offset: int) -> None:
        """Delete, from the front, the segments that lie wholly before this offset; never the last one.

        The longest of their files is kept for the next segment. Raises DiskBroken.
        """
        _, *later = self._replayed()
        num_old = sum(segment.first_offset <= before_offset for segment in later)
        for segment in self._segments[:num_old]:
            if segment.size_bytes > self._spare_bytes:
                self._sure(self._disk.rename, segment.path, self._folder / NEW_SEGMENT)
                self._spare_bytes = segment.size_bytes
            else:
                self._sure(self._disk.unlink, segment.path)
            self._segments = self._segments[1:]
        if num_old:
            self._sure(self._disk.sync_folder, self._folder)

    def close(self) -> None:
        """Flush to the disk and let another daemon have the folder. Raises DiskBroken when the flush fails."""
        if self._lock < 0:
            return
        try:
            if self._file >= 0 and not self._is_broken:
                self._sync(self._file)
                self._cut_old_end()
                self._drop_spare()
        finally:
            for file in (self._file, self._lock):
                if file >= 0:
                    os.close(file)
            self._file = self._lock = -1

    @property
    def _old_bytes(self) -> int:
        """Length of what is on the disk besides the segments."""
        return max(0, self._old_end - self._replayed()[-1].size_bytes) + self._spare_bytes

    def _replayed(self) -> tuple[Segment, ...]:
        if not self._segments:
            raise RuntimeError("the log has to be replayed first")
        return self._segments

    def _open_tail(self) -> None:
        segments = self._recovery.segments
        if segments:
            self._file = self._disk.open(segments[-1].path, os.O_RDWR)
        else:
            tail, self._file = self._create(self._recovery.next_offset, b"")
            segments = [tail]
        self._segments = tuple(segments)

    def _framed(self, payloads: Sequence[Payload]) -> tuple[list[int], list[Buffer]]:
        tail = self._replayed()[-1]
        offset, offsets, buffers = tail.end_offset, [], list[Buffer]()
        for payload in payloads:
            length = sum(map(len, payload))
            if length > MAX_PAYLOAD_BYTES:
                raise ValueError(f"an entry of {length} bytes; at most {MAX_PAYLOAD_BYTES} can be read again")
            buffers += (head(ENTRY, payload, offset, tail.salt), *payload)
            offsets.append(offset)
            offset += HEAD_BYTES + length
        return offsets, buffers

    def _create(self, first_offset: int, snapshot: bytes) -> tuple[Segment, int]:
        """A new segment, which has its name only once its header is on the disk."""
        if len(snapshot) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a snapshot of {len(snapshot)} bytes; at most {MAX_PAYLOAD_BYTES} can be read again")
        salt, temporary = secrets.randbits(64), self._folder / NEW_SEGMENT
        path = segment_path(self._folder, first_offset, salt)
        begin = prefix()
        header = [begin, head(HEADER, [snapshot], first_offset + len(begin), salt), snapshot]
        size_bytes = sum(map(len, header))
        tail = Segment(path, first_offset, salt, size_bytes, header_bytes=size_bytes)
        self._old_end, self._spare_bytes = self._spare_bytes, 0
        try:
            file = self._disk.open(temporary, os.O_RDWR | os.O_CREAT | (0 if self._old_end else os.O_TRUNC))
            try:
                write_all(self._disk, file, [*header, *self._end_mark(tail)], 0)
                self._sync(file)
                self._disk.rename(temporary, path)
            except BaseException:
                self._disk.close(file)
                raise
        except OSError as error:
            self._old_end = 0
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
            raise self._failure(error) from error
        self._sure(self._disk.sync_folder, self._folder)
        return tail, file

    def _end_mark(self, tail: Segment) -> list[Buffer]:
        """What has to stand behind the last entry; nothing where the file ends there by itself."""
        if tail.size_bytes >= self._old_end:
            return []
        self._old_end = max(self._old_end, tail.size_bytes + HEAD_BYTES)
        return [head(END, (), tail.end_offset, tail.salt)]

    def _cut_tail(self) -> None:
        self._sure(self._disk.ftruncate, self._file, self._replayed()[-1].size_bytes)
        self._old_end = 0

    def _cut_old_end(self) -> None:
        if self._old_end > self._replayed()[-1].size_bytes:
            self._cut_tail()

    def _drop_spare(self) -> bool:
        """False when there is none."""
        if not self._spare_bytes:
            return False
        self._sure(self._disk.unlink, self._folder / NEW_SEGMENT)
        self._spare_bytes = 0
        return True

    def _demand_room(self, num_bytes: int, max_bytes: int) -> None:
        if self._is_broken:
            raise DiskBroken("the log failed before and takes nothing more")
        size_bytes = self.size_bytes
        if size_bytes + num_bytes > max_bytes:
            raise DiskFull(f"the log has {size_bytes} of at most {max_bytes} bytes, and {num_bytes} more do not fit")
        if size_bytes + self._old_bytes + num_bytes > max_bytes:
            self._cut_old_end()
            self._drop_spare()

    def _sync(self, file: int) -> None:
        start_s = time.perf_counter()
        self._sure(self._disk.fdatasync, file)
        self.last_sync_s = time.perf_counter() - start_s
        self.sync_s += self.last_sync_s
        self.num_syncs += 1

    def _sure(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Raises DiskBroken for any error: of this call nobody would know what it left on the disk."""
        try:
            call(*args, **kwargs)
        except OSError as error:
            self._is_broken = True
            raise DiskBroken(f"{error.strerror or error}") from error

    def _failure(self, error: OSError) -> DiskFull | DiskBroken:
        if error.errno in NO_ROOM and not self._is_broken:
            return DiskFull(f"{error.strerror or error}")
        self._is_broken = True
        return DiskBroken(f"{error.strerror or error}")


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder until it is closed. Raises RunFolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFolderError(f"cannot use the exchange's log ({error.strerror})", where=str(folder)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise RunFolderError(f"cannot lock the exchange's log ({error.strerror})", where=str(folder)) from error
        cure = "end the other exchange daemon of this run first"
        raise RunFolderError("another exchange daemon uses this folder", where=str(folder), cure=cure) from error
    return lock
