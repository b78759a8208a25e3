"""Records by file: a client of the daemon's host leaves them in a file of its own, and puts only their place.

The file is a ring, written again and again, so that its pages stay in memory and never wait for the disk: it is a way
to hand bytes over, and stores nothing. What is in it counts as unanswered until the daemon has answered. The file is
readable by the user of the run alone (0600), like the daemon's log; its name follows from the name that the client's
key has proved, so that no client points at another's. A checksum in the Put tells whether the bytes are those meant.
"""

import contextlib
import hashlib
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from mrl.exchange.log.frames import checksum_of
from mrl.records.codec import MAX_MESSAGE_BYTES, Buffer
from mrl.records.packs import Spooled

CAPACITY_BYTES = 24 * 1024 * 1024
MIN_BYTES = 16 * 1024
"""What is shorter goes over the socket at no higher cost."""
MAX_OPEN = 256


def spool_path(folder: Path, client: str) -> Path:
    """Where the client called `client` leaves its records; `folder` is the exchange's."""
    return folder / "spool" / f"{hashlib.blake2b(client.encode(), digest_size=16).hexdigest()}.ring"


class Spool:
    """The client's end. Used by one thread at a time."""

    def __init__(self, path: Path, *, capacity_bytes: int = CAPACITY_BYTES) -> None:
        """Make the file anew. Raises OSError when that cannot be done."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._path, self._capacity = path, capacity_bytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._used: deque[tuple[int, int, int]] = deque()
        """(number of the Put, begin, end), in the order of writing."""
        self._answered: set[int] = set()

    def write(self, seq: int, parts: Sequence[Buffer]) -> Spooled | None:
        """Leave what belongs to Put `seq`; None when there is no room for it, or the file cannot be written."""
        num_bytes = sum(map(len, parts))
        position = self._room_for(num_bytes)
        if position is None or num_bytes < MIN_BYTES:
            return None
        try:
            if os.pwritev(self._file, parts, position) != num_bytes:
                return None
        except OSError:
            return None
        self._used.append((seq, position, position + num_bytes))
        return Spooled(position=position, num_bytes=num_bytes, checksum=checksum_of(parts).to_bytes(8, "big"))

    def read_back(self, where: Spooled) -> bytes | None:
        """What was left there; None when it is there no more."""
        try:
            return _read(self._file, where)
        except OSError:
            return None

    def free(self, seq: int) -> None:
        """Put `seq` was answered, or is given up."""
        self._answered.add(seq)
        while self._used and self._used[0][0] in self._answered:
            self._answered.discard(self._used.popleft()[0])
        if not self._used:
            self._answered.clear()

    def close(self) -> None:
        """Remove the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _room_for(self, num_bytes: int) -> int | None:
        """Where so many bytes fit in one piece."""
        if self._file < 0 or num_bytes > self._capacity:
            return None
        if not self._used:
            return 0
        oldest, newest = self._used[0][1], self._used[-1][2]
        if newest > oldest:  # used in one piece
            if newest + num_bytes <= self._capacity:
                return newest
            return 0 if num_bytes <= oldest else None
        return newest if newest + num_bytes <= oldest else None


class Spools:
    """The daemon's end: the files of its clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def open(self, client: str) -> bool:
        """Open the file of a client, which has just made it; False when it cannot be read from here."""
        self._close(client)
        try:
            file = os.open(spool_path(self._folder, client), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            os.close(file)
            return False
        self._files[client] = file
        if len(self._files) > MAX_OPEN:
            self._close(next(iter(self._files)))
        return True

    def has(self, client: str) -> bool:
        """Whether the file of this client is open."""
        return client in self._files

    def read(self, client: str, where: Spooled) -> bytes | None:
        """The bytes that the client means; None when they are not there."""
        file = self._files.get(client)
        if file is None or where.num_bytes > MAX_MESSAGE_BYTES:
            return None
        try:
            return _read(file, where)
        except (OSError, OverflowError):
            return None

    def close(self) -> None:
        """Close all."""
        for client in list(self._files):
            self._close(client)

    def _close(self, client: str) -> None:
        file = self._files.pop(client, None)
        if file is not None:
            os.close(file)


def _read(file: int, where: Spooled) -> bytes | None:
    data = os.pread(file, where.num_bytes, where.position)
    return data if checksum_of([data]).to_bytes(8, "big") == where.checksum else None
