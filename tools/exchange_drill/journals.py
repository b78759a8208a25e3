"""Journal of a process, line by line, in a file that survives its death by SIGKILL."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends one JSON object per line, each with one write."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry, which survives any death of this process."""
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of all whole lines of a journal."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def last_entry(path: Path) -> dict[str, Any] | None:
    """Entry of the newest whole line; None without any."""
    last = None
    for entry in entries(path):
        last = entry
    return last


def cut_torn_line(path: Path) -> None:
    """Remove the part of a last line that a death has left."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
