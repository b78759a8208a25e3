"""The allow-list of a run: public keys with their grants, as one file that servers watch."""

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
        """Raises ConfigError when role and policy are no valid grant."""
        Grant(self.role, self.policy)

    @property
    def grant(self) -> Grant:
        """Role and policy of the key."""
        return Grant(self.role, self.policy)

    @property
    def is_living(self) -> bool:
        """Whether the key has not been revoked."""
        return self.revoked_unix_s is None


class _AllowFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal[1] = 1
    keys: list[KeyEntry]


def fingerprint(public: str) -> str:
    """Return sixteen hexadecimal digits that stand for a public key in tables and logs."""
    return hashlib.blake2b(public.encode(), digest_size=8).hexdigest()


def read_entries(folder: Path) -> list[KeyEntry]:
    """Return all entries, oldest first. Raises RunFolderError when the file is missing, open to others or damaged."""
    path = folder / ALLOW_LIST
    data = read_private(path)
    try:
        return msgspec.json.decode(data, type=_AllowFile).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        cure = "delete the folder; `mrl train --resume` then makes new keys"
        raise RunFolderError(f"the allow-list is damaged ({error})", where=str(path), cure=cure) from error


def write_entries(folder: Path, entries: Iterable[KeyEntry]) -> None:
    """Replace the file with these entries. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(_AllowFile(keys=list(entries))), indent=1)
    replace_file(folder / ALLOW_LIST, data, mode=0o600)


def read_private(path: Path) -> bytes:
    """Return the content of a file that only its owner can read or write. Raises RunFolderError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read()
    except OSError as error:
        cure = "start the run with `mrl train`, which makes the keys"
        raise RunFolderError(
            f"cannot read a key file of the run ({error.strerror})", where=str(path), cure=cure
        ) from error
    if mode & 0o077:
        cure = f"run `chmod 600 {path}`, and make a new key if another user may have read it"
        raise RunFolderError(
            "the file is accessible to other users", where=str(path), got=f"{mode:04o}", wanted="0600", cure=cure
        )
    return data


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of the file at its last reading; replaced as a whole, so that other threads never see a part of it."""

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
        """Return the grant of a living key; None for every other key."""
        return self._content.grants.get(public)

    def is_revoked(self, public: str) -> bool:
        """Whether the key is in the list, and revoked."""
        return public in self._content.revoked

    def reload(self) -> bool:
        """Read the file again if it has changed; return whether it had.

        Raises RunFolderError when the file cannot be read; the content read before then stays in force.
        """
        if self._stamp() == self._content.stamp:
            return False
        self._content = self._read()
        return True

    def _read(self) -> _Content:
        stamp = self._stamp()  # before reading, so that the next reload sees a change in between
        entries = read_entries(self._folder)
        grants = {entry.public: entry.grant for entry in entries if entry.is_living}
        return _Content(stamp, grants, frozenset(entry.public for entry in entries) - grants.keys())

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._folder / ALLOW_LIST)
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_mtime_ns, found.st_size
