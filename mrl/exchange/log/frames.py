"""Frames of a segment file: how an entry lies on the disk, and how entries are found again in what is left of a file.

    file    prefix | frame | frame | ...
    prefix  magic 12 bytes | format u32 | crc u32 of both
    frame   mark u16 = 0x4D52 | kind u8 | flags u8 = 0 | length u32 | payload xxh3 u64 | head xxh3 u64 | payload

All numbers are little-endian. The head's checksum covers the sixteen bytes before it and the frame's absolute offset,
and its seed is the segment's random salt. So nothing that a client can put inside a payload is taken for a frame,
however the bytes around it were damaged, and no frame counts at another place than its own. That is why a released file
can become a new segment without being emptied. Where older bytes follow the last entry, an empty frame END stands
between: it tells a whole end from a torn one, and saves looking for entries in what is not of this segment.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from mrl.records.codec import Buffer

MAGIC = b"mrl exchange"
FORMAT = 3

HEADER, ENTRY, END = 1, 2, 3
"""Kinds of frames: the first of a segment, which carries its snapshot, an entry, and nothing more.

END stands behind the last entry where older bytes follow, and the next entry is written over it.
"""

_KINDS = frozenset({HEADER, ENTRY, END})

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024

_PREFIX = struct.Struct("<12sII")
_HEAD = struct.Struct("<HBBIQQ")
_MARK = 0x4D52
_MARK_BYTES = struct.pack("<H", _MARK)

PREFIX_BYTES = _PREFIX.size
HEAD_BYTES = _HEAD.size

ReadAt = Callable[[int, int], bytes]
"""(length, position) to at most that many bytes; fewer only at the end of the file."""


class Frame(NamedTuple):
    """A whole frame whose checksums hold."""

    position: int
    """In the file, of its first byte."""
    kind: int
    payload: bytes

    @property
    def end(self) -> int:
        """Position of the first byte after it."""
        return self.position + HEAD_BYTES + len(self.payload)


class Damage(NamedTuple):
    """A stretch in which no frame begins: up to the next whole frame, or to the end of the file."""

    position: int
    end: int


class Claim(NamedTuple):
    """A stretch of bytes that says of itself that it is a frame, whether or not that was ever true."""

    position: int
    kind: int
    length: int
    """Of the payload, as the head has it."""
    payload: bytes
    """As much of it as there is."""
    is_whole: bool
    """Whether the payload's own checksum holds."""


def claims_in(data: bytes) -> Iterator[Claim]:
    """Whatever looks like the head of a frame in bytes from anywhere: nothing in it is to be relied on.

    For a person who looks at damaged bytes. The head's checksum needs salt and offset, and is not looked at.
    """
    position = data.find(_MARK_BYTES)
    while 0 <= position <= len(data) - HEAD_BYTES:
        _, kind, flags, length, checksum, _ = _HEAD.unpack_from(data, position)
        begin = position + HEAD_BYTES
        if kind in (HEADER, ENTRY) and not flags and length <= MAX_PAYLOAD_BYTES:
            payload = data[begin : begin + length]
            yield Claim(position, kind, length, payload, checksum_of([payload]) == checksum)
        position = data.find(_MARK_BYTES, position + 1)


def prefix() -> bytes:
    """What every segment file begins with."""
    summed = struct.pack("<12sI", MAGIC, FORMAT)
    return summed + struct.pack("<I", zlib.crc32(summed))


def format_of(data: bytes) -> int:
    """Format number of a file that begins with `data`; 0 when that is no whole prefix."""
    if len(data) < PREFIX_BYTES:
        return 0
    magic, number, crc = _PREFIX.unpack_from(data)
    is_whole = magic == MAGIC and crc == zlib.crc32(data[: PREFIX_BYTES - 4])
    return int(number) if is_whole else 0


def head(kind: int, payload: Sequence[Buffer], offset: int, salt: int) -> bytes:
    """The bytes before a payload, given in parts, in a frame at this absolute offset of a segment with this salt."""
    length, checksum = sum(map(len, payload)), checksum_of(payload)
    return _HEAD.pack(_MARK, kind, 0, length, checksum, _head_checksum(kind, length, checksum, offset, salt))


def checksum_of(parts: Iterable[Buffer]) -> int:
    """xxh3-64 of all parts together: several times as fast as a crc, and no worse against accidents."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def _head_checksum(kind: int, length: int, checksum: int, offset: int, salt: int) -> int:
    """Of a head with its offset in this checksum's place."""
    return xxhash.xxh3_64_intdigest(_HEAD.pack(_MARK, kind, 0, length, checksum, offset), salt)


class FrameScan:
    """The frames of one file, read through a bounded block of it."""

    def __init__(self, read_at: ReadAt, *, size_bytes: int, first_offset: int, salt: int) -> None:
        """`first_offset` is the absolute offset of the file's first byte; nothing behind `size_bytes` is looked at."""
        self._read_at, self._size, self._first_offset, self._salt = read_at, size_bytes, first_offset, salt
        self._start, self._block = 0, b""

    def __iter__(self) -> Iterator[Frame | Damage]:
        """Frames and damaged stretches in the order of the file, which follow each other without a gap.

        They begin after the prefix, which counts as damage when it is not whole, and reach to the end of the file, or
        to END: what stands behind that was never whole, or is of the file's earlier life.
        """
        position = PREFIX_BYTES if format_of(self._bytes(0, PREFIX_BYTES)) else 0
        while position < self._size:
            frame = self._frame_at(position)
            if frame is None:
                frame = self._next_frame(position + 1)
                yield Damage(position, frame.position if frame else self._size)
            if frame is None:
                return
            yield frame
            if frame.kind == END:
                return
            position = frame.end

    def _frame_at(self, position: int) -> Frame | None:
        data = self._bytes(position, HEAD_BYTES)
        if len(data) < HEAD_BYTES:
            return None
        mark, kind, flags, length, checksum, head_checksum = _HEAD.unpack(data)
        begin = position + HEAD_BYTES
        if mark != _MARK or flags or kind not in _KINDS or length > min(MAX_PAYLOAD_BYTES, self._size - begin):
            return None
        if head_checksum != _head_checksum(kind, length, checksum, self._first_offset + position, self._salt):
            return None
        payload = self._bytes(begin, length)
        return Frame(position, kind, payload) if checksum_of([payload]) == checksum else None

    def _next_frame(self, position: int) -> Frame | None:
        """The first whole frame that begins at `position` or later."""
        while (position := self._next_mark(position)) < self._size:
            frame = self._frame_at(position)
            if frame is not None:
                return frame
            position += 1
        return None

    def _next_mark(self, position: int) -> int:
        """Where a frame may begin next; the file's size when nowhere."""
        while position + HEAD_BYTES <= self._size:
            self._load(position, HEAD_BYTES)
            found = self._block.find(_MARK_BYTES, position - self._start)
            if found >= 0:
                return self._start + found
            # The last byte of the block may be the first one of a mark.
            position = max(position + 1, self._start + len(self._block) - 1)
        return self._size

    def _bytes(self, position: int, length: int) -> bytes:
        self._load(position, length)
        offset = position - self._start
        return self._block[offset : offset + min(length, self._size - position)]

    def _load(self, position: int, length: int) -> None:
        """Have `length` bytes from `position` on in the block, as far as there are so many."""
        if self._start <= position and position + length <= self._start + len(self._block):
            return
        self._start, self._block = position, self._read_at(max(length, BLOCK_BYTES), position)
