"""The allow-list of a run: public keys and what each may be, as one file that servers watch."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from mrl.errors import RunFolderError
from mrl.files import replace_file
from mrl.transport.grants import Grant

ALLOW_LIST = "allowed.json"
KEY_CHARACTERS = 40
"""Length of a CURVE key in Z85."""

PublicKey = Annotated[str, msgspec.Meta(min_length=KEY_CHARACTERS, max_length=KEY_CHARACTERS)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client key, living or revoked. Revoked entries stay, so that a refusal can say why."""

    public: PublicKey
    role: str
    policy: str = ""
    made_unix_s: float
    revoked_unix_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError when no grant is like this."""
        Grant(self.role, self.policy)

    @property
    def grant(self) -> Grant:
        """What the key may be."""
        return Grant(self.role, self.policy)

    @property
    def is_living(self) -> bool:
        """Whether it has not been revoked."""
        return self.revoked_unix_s is None


class _AllowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal[1] = 1
    keys: list[KeyEntry]


def fingerprint(public: str) -> str:
    """Sixteen hexadecimal digits that stand for a public key in tables and logs."""
    return hashlib.blake2b(public.encode(), digest_size=8).hexdigest()


def read_entries(folder: Path) -> list[KeyEntry]:
    """All entries, oldest first. Raises RunFolderError when the file is missing, open to others or damaged."""
    path = folder / ALLOW_LIST
    data = read_private(path)
    try:
        return msgspec.json.decode(data, type=_AllowFile).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        cure = "delete the folder and let `mrl train --resume` make new keys"
        raise RunFolderError(f"damaged allow-list ({error})", where=str(path), cure=cure) from error


def write_entries(folder: Path, entries: Iterable[KeyEntry]) -> None:
    """Replace the list. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(_AllowFile(keys=list(entries))), indent=1)
    replace_file(folder / ALLOW_LIST, data, mode=0o600)


def read_private(path: Path) -> bytes:
    """The content of a file that only its owner can read or write. Raises RunFolderError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read()
    except OSError as error:
        cure = "start the run with `mrl train`, which makes the keys"
        raise RunFolderError(f"cannot read a key of the run ({error.strerror})", where=str(path), cure=cure) from error
    if mode & 0o077:
        cure = f"chmod 600 {path}, and make the key anew if a stranger could have read it"
        raise RunFolderError("open to other users", where=str(path), got=f"{mode:04o}", wanted="0600", cure=cure)
    return data


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file said when it was read last; replaced as a whole, so that other threads see all of it."""

    stamp: tuple[int, int, int]
    grants: dict[str, Grant]
    revoked: frozenset[str]


class AllowList:
    """A server's view of the file: read at the start and whenever it has changed. `find` is safe from any thread."""

    def __init__(self, folder: Path) -> None:
        """Raises RunFolderError when the file is missing or damaged."""
        self._folder = folder
        self._content = self._read()

    def find(self, public: str) -> Grant | None:
        """What a living key may be; None for every other."""
        return self._content.grants.get(public)

    def is_revoked(self, public: str) -> bool:
        """Whether the key was allowed once."""
        return public in self._content.revoked

    def reload(self) -> bool:
        """Read the file again if it is another than last time; whether it was.

        Raises RunFolderError when it cannot be read; what was read before then stays in force.
        """
        if self._stamp() == self._content.stamp:
            return False
        self._content = self._read()
        return True

    def _read(self) -> _Content:
        stamp = self._stamp()  # before reading: a change in between is seen by the next reload
        entries = read_entries(self._folder)
        grants = {entry.public: entry.grant for entry in entries if entry.is_living}
        return _Content(stamp, grants, frozenset(entry.public for entry in entries) - grants.keys())

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._folder / ALLOW_LIST)
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_mtime_ns, found.st_size
