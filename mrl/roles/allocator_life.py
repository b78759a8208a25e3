"""The count of the allocators of a run, in its `allocator.json`: the epochs that each of them grants follow from it.

A count that became smaller would use epochs again, and a unit could get two owners. So the file names the run that it
belongs to, by the public key of its servers, which no other run has and which lasts as long as the run.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from mrl.allocation.units import EPOCHS_PER_LIFE
from mrl.errors import RunFolderError
from mrl.files import replace_file

MAX_LIFE = 2**53 // EPOCHS_PER_LIFE - 2
"""Epochs are at most 2**53 (`mrl.records.version.Count`)."""
KEY_CHARS = 8
CURE = "delete it while the run is ended"


class _Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    life: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIFE)]
    run_key: str = ""
    """Empty in a file of an mrl that did not write it."""


def next_life(path: Path, run_key: str) -> int:
    """Number of a new allocator: larger than every one before in the run with this key, also after a crash.

    A file that names no run is taken for this run's. Raises RunFolderError when the file is damaged, names another run,
    or cannot be read or written; it stays as it is.
    """
    before = _read(path)
    if before is not None and before.run_key not in ("", run_key):
        raise RunFolderError(
            "counts the allocators of another run, or the keys of this run were made anew",
            where=str(path),
            got=before.run_key[:KEY_CHARS],
            wanted=f"{run_key[:KEY_CHARS]!r}, how the public key in keys/server.json begins",
            cure=CURE,
        )
    life = before.life + 1 if before else 1
    try:
        replace_file(path, msgspec.json.encode(_Count(life, run_key)))
    except OSError as error:
        raise _unkept(path, error, "free some disk, or make the run folder writable") from error
    return life


def _read(path: Path) -> _Count | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Count)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unkept(path, error, CURE) from error


def _unkept(path: Path, error: Exception, cure: str) -> RunFolderError:
    return RunFolderError(f"the count of allocators cannot be kept ({error})", where=str(path), cure=cure)
