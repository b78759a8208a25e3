"""Endpoint files: a role writes where it listens, the others read it, again after every silence."""

import json
import os
from pathlib import Path

from mrl.files import replace_file


def publish_endpoint(folder: Path, name: str, address: str) -> None:
    """Write `<folder>/<name>.json` with the address and this process's pid, replacing an earlier one atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"address": address, "pid": os.getpid()})
    replace_file(folder / f"{name}.json", content.encode())


def read_endpoint(folder: Path, name: str) -> str | None:
    """The address that `name` published last, or None when there is none that can be read."""
    try:
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    address = content.get("address") if isinstance(content, dict) else None
    return address if isinstance(address, str) and address.startswith("tcp://") else None


def port_of(address: str | None) -> int:
    """The port of "tcp://HOST:PORT"; 0 when there is none."""
    tail = (address or "").rpartition(":")[2]
    return int(tail) if tail.isdigit() and int(tail) <= 65535 else 0
