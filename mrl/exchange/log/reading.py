"""Reads a log without changing it and without its lock: for a person, after a crash or beside a living daemon."""

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.exchange.log.disk import Disk
from mrl.exchange.log.frames import ENTRY, Damage, Frame, FrameScan
from mrl.exchange.log.recovery import Segment, segments_in


def frames_of(segment: Segment) -> Iterator[Frame | Damage]:
    """Frames and damaged stretches of one file, in their order; of a living log the last stretch may be unfinished.

    Raises OSError when the file is gone or cannot be read.
    """
    disk = Disk()
    file = disk.open(segment.path, os.O_RDONLY)
    try:
        yield from FrameScan(
            lambda length, position: disk.pread(file, length, position),
            size_bytes=segment.size_bytes,
            first_offset=segment.first_offset,
            salt=segment.salt,
        )
    finally:
        disk.close(file)


def entries_in(folder: Path) -> Iterator[tuple[int, bytes]]:
    """(absolute offset, payload) of every whole entry of a log. A segment that is released meanwhile is passed over.

    Raises OSError when the folder cannot be read.
    """
    for segment in segments_in(folder):
        try:
            for item in frames_of(segment):
                if isinstance(item, Frame) and item.kind == ENTRY:
                    yield segment.first_offset + item.position, item.payload
        except FileNotFoundError:
            continue
