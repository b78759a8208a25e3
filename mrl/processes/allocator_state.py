"""The file `allocator.json`, through which an allocator passes its number and measured switch times to its successor.

The epochs of an allocator's leases follow from its number. With a smaller number epochs would be used again, and a unit
could get two owners. So the file names its run, by the public key of the run's servers: no other run has this key, and
the key lasts as long as the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.errors import RunFolderError
from mrl.files import replace_file

MAX_LIFE = 2**53 // EPOCHS_PER_LIFE - 2
"""Epochs are at most 2**53 (`mrl.records.version.Count`)."""
KEY_CHARS = 8
CURE = "delete this file while the run is not running"

log = structlog.get_logger()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    life: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIFE)]
    run_key: str
    """Public key of the run's servers."""
    switch_s: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    """Per policy, seconds from a grant to the first request of its engine."""


class AllocatorState:
    """One allocator of a run: its number and the measured switch times, kept in `allocator.json`."""

    def __init__(self, path: Path, kept: _Kept) -> None:
        self._path, self._kept = path, kept

    @property
    def number(self) -> int:
        """Number of this allocator, larger than the number of every earlier allocator of the run."""
        return self._kept.life

    @property
    def switch_s(self) -> Mapping[str, float]:
        """Policy -> seconds of a switch of a unit to it, as measured so far."""
        return self._kept.switch_s

    def keep(self, switch_s: Mapping[str, float]) -> None:
        """Write new measurements. After a failed write a successor measures again."""
        if switch_s == self._kept.switch_s:
            return
        self._kept = msgspec.structs.replace(self._kept, switch_s=dict(switch_s))
        try:
            _write(self._path, self._kept)
        except OSError as error:
            log.warning("cannot save the measured switch times", file=str(self._path), reason=str(error))


def new_allocator_state(path: Path, run_key: str) -> AllocatorState:
    """Return a new allocator of the run with this key, numbered after every earlier one, also after a crash.

    Raises RunFolderError when the file is damaged, names another run, or cannot be read or written; the file stays as
    it is.
    """
    before = _read(path)
    if before is not None and before.run_key != run_key:
        raise RunFolderError(
            "the file belongs to another run, or this run has got new keys",
            where=str(path),
            got=before.run_key[:KEY_CHARS],
            wanted=f"{run_key[:KEY_CHARS]!r}, the beginning of the public key in keys/server.json",
            cure=CURE,
        )
    kept = _Kept(before.life + 1, run_key, before.switch_s) if before else _Kept(1, run_key)
    try:
        _write(path, kept)
    except OSError as error:
        raise _unkept(path, error, "free disk space, or make the run folder writable") from error
    return AllocatorState(path, kept)


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unkept(path, error, CURE) from error


def _write(path: Path, kept: _Kept) -> None:
    replace_file(path, msgspec.json.encode(kept))


def _unkept(path: Path, error: Exception, cure: str) -> RunFolderError:
    return RunFolderError(f"cannot read or write the number of allocators so far ({error})", where=str(path), cure=cure)
