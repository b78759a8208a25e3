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
    """End `policy`, or the whole run where it is empty."""

    policy: str
    by: str
    """Who asks, for people: user, host and process."""
    time_unix_s: float


def file_stop_request(run: Path, policy: str = "") -> Path:
    """Ask for the end; returns the file, which is gone once the supervisor has taken it. Raises OSError."""
    folder = run / _FOLDER
    folder.mkdir(exist_ok=True)
    by = f"{_user()} on {socket.gethostname()} (pid {os.getpid()})"
    request = StopRequest(policy=policy, by=by, time_unix_s=time.time())
    path = folder / f"stop-{policy or 'run'}-{os.getpid()}.json"
    replace_file(path, msgspec.json.encode(request))
    return path


def take_requests(run: Path) -> list[StopRequest]:
    """All requests that lie there, oldest first; they are removed, and what cannot be read is dropped."""
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
    """Forget what was asked of an earlier attempt, and what became of it."""
    for path in (run / _FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)


def note_ended(run: Path, policy: str) -> None:
    """Say that the processes of a stopped policy are gone."""
    replace_file(_ended(run, policy), b"{}")


def is_ended(run: Path, policy: str) -> bool:
    """Whether this attempt's supervisor said so."""
    return _ended(run, policy).exists()


def _ended(run: Path, policy: str) -> Path:
    return run / _FOLDER / f"ended-{policy}.json"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"user {os.getuid()}"
