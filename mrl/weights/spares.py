"""The files of pruned versions, written over by later ones: on a file system in memory, pages that are there already
take bytes several times faster than new ones.

A file is written over only when nobody else has it: no other name (an evaluation's snapshot is one), and no reader that
holds it. Whoever reads a version therefore `hold`s it; the kernel lets go when the reader dies.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mrl.config.locks import try_lock
from mrl.errors import WeightsError

FILES = "*.safetensors"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """While a published version is read: keep its files as they are, and where they are unless it is pruned already.

    Raises WeightsError when it is no longer there.
    """
    with ExitStack() as closing:
        try:
            for path in sorted(folder.glob(FILES)):
                file = closing.enter_context(path.open("rb"))
                if not try_lock(file.fileno(), path, is_shared=True):
                    raise WeightsError(f"{folder}: has been pruned")
        except FileNotFoundError as error:
            raise WeightsError(f"{folder}: has been pruned") from error
        if not folder.is_dir():
            raise WeightsError(f"{folder}: has been pruned")
        yield


def is_held(folder: Path) -> bool:
    """Whether somebody holds a published version, which its publisher then does not prune."""
    for path in folder.glob(FILES):
        with suppress(FileNotFoundError), path.open("r+b") as file:  # NFS locks for one alone who may write
            if not try_lock(file.fileno(), path):
                return True
    return False


class Spares:
    """The files of the version pruned last, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Files that an earlier life left are as good as any."""
        self._folder = folder

    def keep(self, version: Path) -> None:
        """Take over the files of a version that is about to be removed; those kept before go."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for path in version.glob(FILES):
            path.rename(self._folder / path.name)

    @contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """A file to be written at `path`: one that was kept, if nobody else has it, or a new one.

        It is as long as what was written when it is closed.
        """
        with self._take(path) or path.open("wb", buffering=0) as file:
            yield file
            file.truncate()

    def _take(self, path: Path) -> BinaryIO | None:
        for spare in sorted(self._folder.glob(FILES)):
            with suppress(FileNotFoundError):
                spare.rename(path)
                file = path.open("r+b", buffering=0)
                if _is_free(file):
                    return file
                file.close()
                path.unlink()
        return None


def _is_free(file: BinaryIO) -> bool:
    """Whether the file has no other name and no reader; then none can begin to hold it."""
    return try_lock(file.fileno(), Path(file.name)) and os.fstat(file.fileno()).st_nlink == 1
