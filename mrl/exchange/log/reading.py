"""Reads a log without changing it and without its lock: for a person, after a crash or beside a living daemon."""

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.exchange.log.disk import Disk
from mrl.exchange.log.frames import ENTRY, Damage, Frame, FrameScan
from mrl.exchange.log.recovery import Segment, segments_in


def frames_of(segment: Segment) -> Iterator[Frame | Damage]:
    """Frames and damaged stretches of one file, in their order; of a living log the last stretch may be unfinished.

    Raises OSError when the file is gone or cannot be read; FileNotFoundError also when it was released meanwhile, so
    that what looks damaged is a later segment.
    """
    disk = Disk()
    file = disk.open(segment.path, os.O_RDONLY)
    try:
        for item in FrameScan(
            lambda length, position: disk.pread(file, length, position),
            size_bytes=segment.size_bytes,
            first_offset=segment.first_offset,
            salt=segment.salt,
        ):
            if isinstance(item, Damage):
                segment.path.stat()  # raises where the file is another segment by now
            yield item
    finally:
        disk.close(file)


def entries_in(folder: Path) -> Iterator[tuple[int, bytes]]:
    """(absolute offset, payload) of every whole entry of a log.

    What a living daemon releases meanwhile is passed over; what it writes anew then comes later, with segments that
    have begun meanwhile. As many of these are read as there were in the beginning. Raises OSError when the folder
    cannot be read.
    """
    for segment in _segments_of_living(folder):
        try:
            for item in frames_of(segment):
                if isinstance(item, Frame) and item.kind == ENTRY:
                    yield segment.first_offset + item.position, item.payload
        except FileNotFoundError:
            continue


def _segments_of_living(folder: Path) -> Iterator[Segment]:
    """In their order, each as it is when its turn has come."""
    upto = -1
    for _ in range(2 * len(segments_in(folder))):
        later = [segment for segment in segments_in(folder) if segment.first_offset > upto]
        if not later:
            return
        upto = later[0].first_offset
        yield later[0]
