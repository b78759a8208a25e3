"""The run's CURVE keys: one pair for its servers, one for its clients, created once per run folder."""

from dataclasses import dataclass, field
from pathlib import Path

import zmq

from mrl.errors import RunFolderError
from mrl.files import replace_file

_FILES = ("server_public", "server_secret", "client_public", "client_secret")
_Z85_KEY_BYTES = 40


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Two key pairs in Z85, 40 bytes each. The secret halves do not show in `repr`."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)


def create_keys(folder: Path) -> RunKeys:
    """Make fresh keys in `folder`, which only the owner can enter, and return them.

    Raises RunFolderError when the folder cannot be written.
    """
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = RunKeys(server_public, server_secret, client_public, client_secret)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for name in _FILES:
            replace_file(folder / name, getattr(keys, name), mode=0o600)
    except OSError as error:
        raise RunFolderError(f"cannot write the run's keys ({error.strerror})", where=str(folder)) from error
    return keys


def load_keys(folder: Path) -> RunKeys:
    """The keys that `create_keys` left in `folder`.

    Raises RunFolderError when a key is missing, unreadable or damaged.
    """
    return RunKeys(*(_read_key(folder / name) for name in _FILES))


def _read_key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except OSError as error:
        cure = "start the run with `mrl train`, which makes the keys"
        raise RunFolderError(f"cannot read a key of the run ({error.strerror})", where=str(path), cure=cure) from error
    if len(key) != _Z85_KEY_BYTES:
        raise RunFolderError("damaged key", where=str(path), got=f"{len(key)} bytes", wanted=f"{_Z85_KEY_BYTES} bytes")
    return key
