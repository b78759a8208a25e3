"""Whoever reads a published version holds it: nothing is written over it then, and its publisher does not prune it.

The kernel lets go when the reader dies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mrl.config.locks import try_lock
from mrl.errors import WeightsError

FILES = "*.safetensors"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """While a published version is read: keep its files as they are, and where they are unless it is pruned already.

    Raises WeightsError when it is no longer there, or lies in the memory of a process that lets nobody see it.
    """
    with ExitStack() as closing:
        try:
            for path in sorted(folder.glob(FILES)):
                file = closing.enter_context(path.open("rb"))
                if not try_lock(file.fileno(), path, is_shared=True):
                    raise WeightsError(f"{folder}: has been pruned")
        except FileNotFoundError as error:
            raise WeightsError(f"{folder}: has been pruned") from error
        except PermissionError as error:
            raise WeightsError(f"{error.filename}: in the memory of a process that is not this user's") from error
        if not folder.is_dir():
            raise WeightsError(f"{folder}: has been pruned")
        yield


def is_held(folder: Path) -> bool:
    """Whether somebody holds a published version."""
    for path in folder.glob(FILES):
        with suppress(FileNotFoundError), path.open("r+b") as file:  # NFS locks for one alone who may write
            if not try_lock(file.fileno(), path):
                return True
    return False
