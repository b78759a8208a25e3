"""Requests to end a run, or one policy of it: files in `requests/` of the run folder, from any host that sees it."""

import getpass
import os
import socket
import time
from pathlib import Path

import msgspec

from mrl.files import replace_file

MAX_BYTES = 4096
_FOLDER = "requests"


class StopRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to end `policy`, or the whole run if `policy` is empty."""

    policy: str
    by: str
    """User, host and process that ask, for people."""
    time_unix_s: float


def file_stop_request(run: Path, policy: str = "") -> Path:
    """Write a request; return its file, which the supervisor removes. Raises OSError."""
    folder = run / _FOLDER
    folder.mkdir(exist_ok=True)
    by = f"{_user()} on {socket.gethostname()} (pid {os.getpid()})"
    request = StopRequest(policy=policy, by=by, time_unix_s=time.time())
    path = folder / f"stop-{policy or 'run'}-{os.getpid()}.json"
    replace_file(path, msgspec.json.encode(request))
    return path


def take_requests(run: Path) -> list[StopRequest]:
    """Remove and return all requests, oldest first. Unreadable files are dropped."""
    found = []
    for path in (run / _FOLDER).glob("stop-*.json"):
        try:
            data = path.read_bytes()[: MAX_BYTES + 1]
            path.unlink()
            found.append(msgspec.json.decode(data, type=StopRequest))
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            continue
    return sorted(found, key=lambda request: request.time_unix_s)


def clear_requests(run: Path) -> None:
    """Remove the requests of an earlier attempt and their results."""
    for path in (run / _FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


def note_ended(run: Path, policy: str) -> None:
    """Record that the processes of a stopped policy have ended."""
    replace_file(_ended(run, policy), b"{}")


def is_ended(run: Path, policy: str) -> bool:
    """Whether the supervisor of this attempt has recorded the end of a stopped policy's processes."""
    return _ended(run, policy).exists()


def _ended(run: Path, policy: str) -> Path:
    return run / _FOLDER / f"ended-{policy}.json"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"user {os.getuid()}"
