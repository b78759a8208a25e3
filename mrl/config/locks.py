"""Locks on files, which the kernel drops when their holder dies; and file systems that take none."""

import fcntl
from pathlib import Path

from mrl.errors import RunFolderError


def try_lock(file: int, where: Path, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; False where somebody else holds it. Waits for nobody.

    Raises RunFolderError where the file system of `where` takes no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"its file system takes no locks ({error.strerror})",
            where=str(where),
            wanted="flock, without which nobody can tell whether a run is going on there",
            cure="--run.folder on another one; or have it mounted with locks: Lustre with flock, NFS without nolock",
        ) from None
    return True
