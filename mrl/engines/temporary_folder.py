"""A server's temporary folder; where its owner was killed, whoever makes the next one removes it.

The owner holds a lock in it, which the kernel drops when the owner dies: what can be locked has no owner. The folder
itself is locked too, which keeps systemd from removing what it finds there after ten days as old.
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
    """A new folder of this process, with a short path: those of sockets may have 107 characters."""

    def __init__(self, *, parent: Path | None = None, prefix: str = PREFIX) -> None:
        """Make it in `parent`, by default the temporary folder; remove those there that nobody owns any more.

        Raises OSError.
        """
        for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):  # another user's, say
                if (lock := _lock(left, "r+b")) is not None:
                    _remove(left, lock)
        made = None
        while made is None:  # somebody who removes what is left may have locked it first
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            made = _lock(self.path, "x+b")
        self._owned = made
        self._itself = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # a network's, which locks no folders
            fcntl.flock(self._itself, fcntl.LOCK_SH)

    def remove(self) -> None:
        """With all that lies there. May be called again."""
        _remove(self.path, self._owned)
        if self._itself >= 0:
            os.close(self._itself)
            self._itself = -1


def _lock(folder: Path, mode: str) -> BinaryIO | None:
    """The lock of a folder, held; None where somebody holds it, and where it is not there any more. Raises OSError."""
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
