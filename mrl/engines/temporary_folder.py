"""A server's temporary folder; if its owner was killed, the process that makes the next such folder removes it.

The owner holds a lock on a file in the folder, which the kernel drops when the owner dies: a folder whose file can be
locked has no owner. The folder itself is locked too, which keeps systemd from removing its files as old after ten days.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX = "mrl-server-"
LOCK = "owner.lock"


class TemporaryFolder:
    """A new folder of this process, with a short path: the path of a socket may have 107 characters."""

    def __init__(self, *, parent: Path | None = None, prefix: str = PREFIX) -> None:
        """Make the folder in `parent`, by default the system's temporary folder; remove folders there without an owner.

        Raises OSError.
        """
        for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):  # another user's, say
                if (lock := _lock(left, "r+b")) is not None:
                    _remove(left, lock)
        made = None
        while made is None:  # another process that removes folders without an owner may have locked it first
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            made = _lock(self.path, "x+b")
        self._owned = made
        self._itself = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a network file system may lock no folders
            fcntl.flock(self._itself, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder with all that lies in it. May be called again."""
        _remove(self.path, self._owned)
        if self._itself >= 0:
            os.close(self._itself)
            self._itself = -1


def _lock(folder: Path, mode: str) -> BinaryIO | None:
    """Take the lock of a folder; None where another process holds it, or it is gone. Raises OSError."""
    with suppress(FileNotFoundError, BlockingIOError), ExitStack() as closing:
        file: BinaryIO = closing.enter_context((folder / LOCK).open(mode))  # type: ignore[assignment]
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            closing.pop_all()
            return file
    return None


def _remove(folder: Path, lock: BinaryIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
