"""The read lock of a published version: while it is held, nothing is written over the version, nor is it pruned.

The kernel lets go when the reader dies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mrl.config.locks import try_lock
from mrl.errors import WeightsError, WeightsGone

FILES = "*.safetensors"
CURE = 'where processes may not read each other\'s memory: rollout.weights_in = "disk" of the policy'


@contextmanager
def read_lock(folder: Path) -> Iterator[None]:
    """While a published version is read: keep its files as they are, and where they are unless it is pruned already.

    Raises WeightsGone when it is no longer there, and WeightsError when it lies in the memory of a process that lets
    nobody see it.
    """
    with ExitStack() as closing:
        try:
            for path in sorted(folder.glob(FILES)):
                file = closing.enter_context(path.open("rb"))
                if not try_lock(file.fileno(), path, is_shared=True):
                    raise WeightsGone(f"{folder}: has been pruned")
        except FileNotFoundError as error:
            lost = [path for path in folder.glob(FILES) if path.is_symlink()]  # and of what was pruned there is nothing
            gone = f"is in the memory of a process that has ended, or is not to be seen from here; {CURE}"
            raise WeightsGone(f"{folder}: {gone if lost else 'has been pruned'}") from error
        except OSError as error:  # a path below /proc that is hidden, or of another process by now
            raise WeightsError(f"{error.filename}: not to be read ({error.strerror}); {CURE}") from error
        if not folder.is_dir():
            raise WeightsGone(f"{folder}: has been pruned")
        yield


def is_read_locked(folder: Path) -> bool:
    """Whether somebody holds a published version."""
    for path in folder.glob(FILES):
        with suppress(OSError), path.open("r+b") as file:  # NFS locks for one alone who may write
            if not try_lock(file.fileno(), path):
                return True
    return False
