"""Endpoint files: a role writes the address at which it listens, the others read it, again after every silence."""

import json
import os
import socket
from functools import cache
from pathlib import Path

from mrl.files import replace_file

HOST = "MRL_HOST"
"""Environment variable: name of this host in a run on several hosts. Processes under different names count as on
different hosts."""
ADDRESS = "MRL_ADDRESS"
"""Environment variable: address at which other hosts reach this one, where its hostname does not serve."""
WILDCARDS = ("*", "0.0.0.0", "::")
"""Addresses that mean every network interface."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def publish_endpoint(folder: Path, name: str, address: str, ipc_path: Path | None = None) -> None:
    """Write `<folder>/<name>.json`, replacing an earlier file atomically.

    The file holds the address and the pid; for a server that listens on a socket file also the file's path and the
    host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, object] = {"address": address, "pid": os.getpid()}
    if ipc_path is not None:
        content |= {"ipc_path": str(ipc_path), "ipc_host": _this_host()}
    replace_file(folder / f"{name}.json", json.dumps(content).encode())


def read_endpoint(folder: Path, name: str) -> str | None:
    """Return the tcp address that `name` published last; None without a readable one."""
    address = _read(folder, name).get("address")
    return address if isinstance(address, str) and address.startswith("tcp://") else None


def is_published(folder: Path, name: str) -> bool:
    """Whether `name` has published anything that can be read."""
    return bool(_read(folder, name))


def nearest_endpoint(folder: Path, name: str) -> str | None:
    """Return the address of the socket file where it lies on this host, else the address of `read_endpoint`."""
    ipc_path = _ipc_path(folder, name)
    return f"ipc://{ipc_path}" if ipc_path else read_endpoint(folder, name)


def reachable_host(bound: str) -> str:
    """Return the host by which others reach a server bound to `bound`; for a wildcard, this host's own address."""
    return os.environ.get(ADDRESS) or socket.gethostname() if bound in WILDCARDS else bound


def own_host(theirs: str) -> str:
    """Return the host at which this process listens for a peer at `theirs`: on loopback both or neither."""
    return theirs if is_loopback(theirs) else reachable_host("*")


def is_loopback(host: str) -> bool:
    """Whether only processes on this host can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def port_of(address: str | None) -> int:
    """Return the port of "tcp://HOST:PORT"; 0 when there is none."""
    tail = (address or "").rpartition(":")[2]
    return int(tail) if tail.isdigit() and int(tail) <= 65535 else 0


def _ipc_path(folder: Path, name: str) -> str:
    content = _read(folder, name)
    ipc_path = content.get("ipc_path")
    is_here = isinstance(ipc_path, str) and content.get("ipc_host") == _this_host() and os.path.exists(ipc_path)
    return str(ipc_path) if is_here else ""


def _read(folder: Path, name: str) -> dict[str, object]:
    try:
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@cache
def _this_host() -> str:
    """Return the id of this kernel's boot and the host's name in the run.

    Hostnames may be equal; boot ids are not, and containers on one kernel share one.
    """
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine} {os.environ.get(HOST, '')}".rstrip()
