"""The CURVE keys of a run: one pair for its servers, one for every role and policy that connects to them.

All files lie in `keys/` of the run folder (0700), one per pair (0600), each replaced whole. A client's file also holds
the servers' public key, so that a client on another host needs only this file.
"""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from mrl.errors import ConfigError, RunFolderError
from mrl.files import replace_file
from mrl.transport.allow_list import ALLOW_LIST, KeyEntry, PublicKey, read_entries, read_private, write_entries
from mrl.transport.grants import STANDING_GRANTS, Grant

_ONE_PAIR_FORM = "client_secret"
_SERVER_FILE = "server.json"


class _ServerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: PublicKey
    secret: PublicKey


class _ClientFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_public: PublicKey
    public: PublicKey
    secret: PublicKey


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of a server of the run: its pair in Z85, and the folder with the allow-list. `repr` shows no secret."""

    folder: Path
    server_public: bytes
    server_secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys of a client: its own pair and the servers' public key, in Z85. `repr` shows no secret."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def create_keys(folder: Path, grants: Iterable[Grant] = ()) -> RunKeys:
    """Make the keys that `folder` lacks: the servers' pair, those of the standing roles and those of `grants`.

    Existing keys stay; a grant whose key was revoked gets a new one. Raises RunFolderError when the folder cannot be
    written, holds a damaged file, or holds keys of the form with one pair for all clients.
    """
    with _changing(folder):
        if not (folder / _SERVER_FILE).exists():
            public, secret = zmq.curve_keypair()
            write_entries(folder, [])  # first, so that a death in between leaves no pair without a list
            _write(folder / _SERVER_FILE, _ServerFile(public.decode(), secret.decode()))
        keys = load_keys(folder)
        entries = read_entries(folder)
        living = {entry.grant for entry in entries if entry.is_living and client_file(folder, entry.grant).exists()}
        missing = [grant for grant in dict.fromkeys((*STANDING_GRANTS, *grants)) if grant not in living]
        if missing:
            earlier = [_revoked(entry) if entry.grant in missing else entry for entry in entries]
            write_entries(folder, [*earlier, *(_make(folder, keys, grant) for grant in missing)])
    return keys


def load_keys(folder: Path) -> RunKeys:
    """Load the servers' keys that `create_keys` made in `folder`. Raises RunFolderError when they cannot be used."""
    _check_form(folder)
    pair = _decode(folder / _SERVER_FILE, _ServerFile)
    return RunKeys(folder, pair.public.encode(), pair.secret.encode())


def load_client_keys(folder: Path, grant: Grant) -> ClientKeys:
    """Load a client's keys that `create_keys` made in `folder`. Raises RunFolderError when they cannot be used."""
    _check_form(folder)
    path = client_file(folder, grant)
    if not path.exists() and (folder / _SERVER_FILE).exists():
        words = f"{grant.role} {grant.policy}".strip()
        cure = f"`mrl exchange keys {folder.parent} make {words}` makes one"
        raise RunFolderError(f"the key of {grant.name} does not exist or was revoked", where=str(path), cure=cure)
    pair = _decode(path, _ClientFile)
    return ClientKeys(pair.server_public.encode(), pair.public.encode(), pair.secret.encode())


def client_file(folder: Path, grant: Grant) -> Path:
    """Return the path of the file with the pair of a grant."""
    return folder / f"{grant.name.replace('/', '.')}.json"


def make_client_key(folder: Path, grant: Grant) -> KeyEntry:
    """Make and allow a key for `grant`. Raises ConfigError if a living one exists, RunFolderError as `create_keys`."""
    with _changing(folder):
        keys, entries = load_keys(folder), read_entries(folder)
        if any(entry.grant == grant and entry.is_living for entry in entries):
            cure = f"revoke it first: `mrl exchange keys {folder.parent} revoke {grant.name}`"
            raise ConfigError("a key of this name already exists", where=str(folder), got=grant.name, cure=cure)
        made = _make(folder, keys, grant)
        write_entries(folder, [*entries, made])
    return made


def revoke_client_key(folder: Path, name: str) -> KeyEntry:
    """Revoke the living key of the grant called `name` and delete its file.

    Servers see it within a second. Raises ConfigError when there is no such key, RunFolderError as `create_keys`.
    """
    with _changing(folder):
        load_keys(folder)
        entries = read_entries(folder)
        living = {entry.grant.name: entry for entry in entries if entry.is_living}
        if name not in living:
            known = any(entry.grant.name == name for entry in entries)
            what = "the key is already revoked" if known else "no such key"
            raise ConfigError(what, where=str(folder), got=name, wanted=f"one of {', '.join(living)}" if living else "")
        revoked = _revoked(living[name])
        write_entries(folder, [revoked if entry is living[name] else entry for entry in entries])
        client_file(folder, revoked.grant).unlink(missing_ok=True)
    return revoked


def _make(folder: Path, keys: RunKeys, grant: Grant) -> KeyEntry:
    """Write a new pair's file, then return its entry: a key that is allowed can be used."""
    public, secret = zmq.curve_keypair()
    content = _ClientFile(keys.server_public.decode(), public.decode(), secret.decode())
    _write(client_file(folder, grant), content)
    return KeyEntry(public=public.decode(), role=grant.role, policy=grant.policy, made_unix_s=time.time())


def _revoked(entry: KeyEntry) -> KeyEntry:
    return msgspec.structs.replace(entry, revoked_unix_s=time.time()) if entry.is_living else entry


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that there is one writer at a time; turn every OSError into a RunFolderError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _check_form(folder)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise RunFolderError(f"cannot write the run's keys ({error.strerror})", where=str(folder)) from error


def _check_form(folder: Path) -> None:
    if (folder / _ONE_PAIR_FORM).exists() and not (folder / ALLOW_LIST).exists():
        cure = f"run `rm -r {folder}`; `mrl train --resume` then makes new keys"
        raise RunFolderError(
            "the keys were made by an older mrl, one pair for all clients", where=str(folder), cure=cure
        )


def _write(path: Path, content: msgspec.Struct) -> None:
    replace_file(path, msgspec.json.encode(content), mode=0o600)


F = TypeVar("F", _ServerFile, _ClientFile)


def _decode(path: Path, kind: type[F]) -> F:
    data = read_private(path)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The decoder's own words could quote a secret.
        cure = "delete the file; `mrl train --resume` or `mrl exchange keys RUN make` then makes a new key"
        raise RunFolderError("the key file is damaged", where=str(path), got=f"{len(data)} bytes", cure=cure) from None
