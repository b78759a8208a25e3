"""Locks on files, which the kernel drops when their holder dies. Some file systems take none."""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrl.errors import RunFolderError


def try_lock(file: int, where: Path, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed; return False where another process holds the lock. Never waits.

    Raises RunFolderError where the file system of `where` takes no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"the file system does not support file locks ({error.strerror})",
            where=str(where),
            wanted="flock, by which mrl detects whether a run is still running",
            cure="set --run.folder to another file system, or mount Lustre with flock, NFS without nolock",
        ) from None
    return True


def lock_folder(folder: Path, name: str) -> list[int] | None:
    """Lock a folder by its file `name`, until the returned descriptors are closed; None where another process holds it.

    The folder itself is locked too where its file system can do that: then deleting the file lets nobody else in. The
    file's content is the holder's process id. Raises OSError, and RunFolderError where there are no locks.
    """
    held: list[int] = []
    try:
        held.append(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if try_lock(held[0], folder) and _try_lock_itself(held[1]) and is_still(held[0], folder / name):
            os.ftruncate(held[0], 0)
            os.pwrite(held[0], f"{os.getpid()}\n".encode(), 0)
            return held
    except BaseException:
        unlock(held)
        raise
    unlock(held)
    return None


def unlock(held: list[int]) -> None:
    """Release a lock by closing the descriptors that `lock_folder` returned."""
    while held:
        os.close(held.pop())


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a folder locked during the block, so that `remove_left` leaves it alone. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _try_lock_itself(file)
        yield
    finally:
        os.close(file)


def remove_left(parent: Path, prefix: str) -> None:
    """Delete the folders whose names begin with `prefix` and that no process has locked: their makers were killed.

    Such folders stay where the file system locks no folders, such as NFS.
    """
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def is_still(file: int, path: Path) -> bool:
    """Whether an open file is still the file at `path`, neither deleted nor replaced."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _try_lock_itself(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that locks no folders, such as NFS: the lock of the file has to do
        return True
    return True
