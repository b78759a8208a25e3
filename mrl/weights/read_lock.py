"""Read lock of a published version: while it is held, the version is neither written over nor pruned.

The kernel drops the lock when the reader dies.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mrl.config.locks import try_lock
from mrl.errors import WeightsError, WeightsGone
from mrl.weights.manifest import MANIFEST

FILES = "*.safetensors"
CURE = 'if processes may not read each other\'s memory, set rollout.weights_in = "disk" for the policy'


@contextmanager
def read_lock(folder: Path) -> Iterator[None]:
    """Keep the files of a published version as they are while it is read, and in place unless it is pruned already.

    Raises WeightsGone when it is no longer there, also where it goes while it is read, and WeightsError when it lies in
    the memory of a process that cannot be seen from here.
    """
    with ExitStack() as closing:
        paths = sorted(folder.glob(FILES))
        try:
            for path in paths:
                file = closing.enter_context(path.open("rb"))
                if not try_lock(file.fileno(), path, is_shared=True):
                    raise WeightsGone(f"{folder}: has been pruned")
        except FileNotFoundError as error:
            raise WeightsGone(f"{folder}: {_fate(folder)}") from error
        except OSError as error:  # a path below /proc that is hidden, or of another process by now
            raise WeightsError(f"{error.filename}: cannot be read ({error.strerror}); {CURE}") from error
        if not (folder / MANIFEST).exists():  # pruning and writing over remove it first
            raise WeightsGone(f"{folder}: has been pruned")
        try:
            yield
        except WeightsError as error:  # a loader opens the files by their names
            if all(os.path.exists(path) for path in paths):
                raise
            raise WeightsGone(f"{folder}: {_fate(folder)}") from error


def _fate(folder: Path) -> str:
    """Return what became of a version with missing files: a pruned version leaves nothing, a lost memory dead links."""
    if any(path.is_symlink() and not os.path.exists(path) for path in folder.glob(FILES)):
        return f"is in the memory of a process that has ended or cannot be accessed from this process; {CURE}"
    return "has been pruned"


def is_read_locked(folder: Path) -> bool:
    """Whether any process holds the read lock of a published version."""
    for path in folder.glob(FILES):
        with suppress(OSError), path.open("r+b") as file:  # NFS: an exclusive lock needs a writable file
            if not try_lock(file.fileno(), path):
                return True
    return False
