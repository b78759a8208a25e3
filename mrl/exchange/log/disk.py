"""The calls to the operating system through which the log reads and changes its files, and how they may fail."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from mrl.records.codec import Buffer

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write that may succeed later: no space, no quota, file too large."""

MAX_BUFFERS_PER_WRITE = 1024
"""IOV_MAX of Linux."""


class Disk:
    """Plain system calls, one method each; every method raises OSError as the call does."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that no child inherits; new files get mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def size(self, file: int) -> int:
        """Length in bytes."""
        return os.fstat(file).st_size

    def pread(self, file: int, length: int, position: int) -> bytes:
        """At most `length` bytes."""
        return os.pread(file, length, position)

    def pwritev(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        """How many bytes were written; may be fewer than there are in `buffers`."""
        return os.pwritev(file, buffers, position)

    def fdatasync(self, file: int) -> None:
        """Wait until the content, and the length that is needed to find it, is on the disk."""
        os.fdatasync(file)

    def ftruncate(self, file: int, length: int) -> None:
        """Cut off what lies behind `length`."""
        os.ftruncate(file, length)

    def forget_cached(self, file: int) -> None:
        """Let the next read come from the disk, for all pages that are not waiting to be written."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name on the same file system."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name; somebody may have done so before."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in `folder` are on the disk."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self, file: int) -> None:
        """Give the descriptor back."""
        os.close(file)


def write_all(disk: Disk, file: int, buffers: Sequence[Buffer], position: int) -> int:
    """Write all buffers one behind the other from `position` on, and return the position after them.

    Raises OSError when the disk does; how much was written by then is not known.
    """
    for start in range(0, len(buffers), MAX_BUFFERS_PER_WRITE):
        rest = buffers[start : start + MAX_BUFFERS_PER_WRITE]
        while rest:
            written = disk.pwritev(file, rest, position)
            if written <= 0:
                raise OSError(errno.EIO, "the disk took no byte and gave no reason")
            position += written
            rest = _without(rest, written)
    return position


def _without(buffers: Sequence[Buffer], written: int) -> Sequence[Buffer]:
    for number, buffer in enumerate(buffers):
        if written < len(buffer):
            return [buffer[written:], *buffers[number + 1 :]]
        written -= len(buffer)
    return []
