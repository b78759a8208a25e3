"""Replace a file so that readers see the old content or the new, never a part; check the room on a disk."""

import errno
import os
import secrets
import tempfile
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk, or of a user's quota, that is full."""


def replace_file(path: Path, data: bytes, *, mode: int = 0o666, sync: bool = True) -> None:
    """Write `data` under a temporary name beside `path`, then rename; `sync` forces the data to the disk first.

    The process's umask clears bits of `mode`. On any error the old file stays and nothing else is left.
    Raises OSError.
    """
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether the disk of `folder` has room for a file of `num_bytes` (>= 1); the check writes no data."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError:
        return False
    return True
