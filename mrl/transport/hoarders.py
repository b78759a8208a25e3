"""Connections on which far more has come in than was read of their messages: they fill the memory of the process.

A socket bounds the messages that wait to be read, and not what it gathers of one whose last frame does not come. So
what the kernel has received of a connection is compared with what was read of its messages. Not covered: socket files,
where the kernel counts nothing, and a connection whose first message is not complete, whose key is not known yet.
Against those a process needs a hard limit of its memory.
"""

import ctypes
import fcntl
import os
import socket
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mrl.transport.links import Link

MAX_UNREAD_BYTES = 12 * 1024 * 1024
"""Of one connection; half as much again as the longest message, or as the exchange lets one client have
unacknowledged."""
MAX_TOTAL_UNREAD_BYTES = 32 * 1024 * 1024
"""Of all connections. Beyond it the greatest is a hoarder. More than the exchange lets all clients together have
unacknowledged."""
MIN_HOARD_BYTES = 1024 * 1024
"""Who has less unread is none, whatever others do."""
LOOK_S, LOOK_SOON_S = 0.05, 0.01
"""How often one should look, and how often when much is unread: at 1 GB/s 10 MB come meanwhile."""

_MAX_SHORT_FRAME_BYTES = 255
_SEALED_BYTES = 33
"""What CURVE adds to a frame: the name of the command, nonce, authenticator and flags."""
_RECEIVED = slice(128, 136)
"""`tcpi_bytes_received` in the kernel's `struct tcp_info`, see linux/tcp.h."""
_libc = ctypes.CDLL(None)


class Hoarder(NamedTuple):
    """A connection to be cut."""

    link: Link
    unread_bytes: int


@dataclass(slots=True)
class _Account:
    """Of one connection."""

    link: Link
    read_bytes: int = 0


class Hoarders:
    """What was read of every tcp connection, and on which too much was not. Used by one thread."""

    def __init__(
        self, *, max_unread_bytes: int = MAX_UNREAD_BYTES, max_total_unread_bytes: int = MAX_TOTAL_UNREAD_BYTES
    ) -> None:
        self._max_unread_bytes, self._max_total_unread_bytes = max_unread_bytes, max_total_unread_bytes
        self._accounts: dict[tuple[int, int], _Account] = {}
        """By connection; those that ended are dropped when they are looked at."""
        self.look_every_s = LOOK_S
        """When one should look again."""
        self.ended: list[tuple[int, int]] = []
        """Connections that were found to be no more: who sends under their names has come back over others."""

    def __len__(self) -> int:
        return len(self._accounts)

    def note_read(self, link: Link, frames_bytes: int) -> None:
        """So many bytes of this connection were read; the first time it is looked at from then on."""
        account = self._accounts.get(link.connection)
        if account is None:
            account = self._accounts[link.connection] = _Account(link)
        account.read_bytes += frames_bytes

    def take(self) -> list[Hoarder]:
        """The connections to be cut now, which are looked at no longer."""
        unread = sorted(self._unread(), key=lambda one: -one.unread_bytes)
        total_bytes = sum(one.unread_bytes for one in unread)
        self.look_every_s = LOOK_SOON_S if 4 * total_bytes > self._max_total_unread_bytes else LOOK_S
        found = []
        for one in unread:
            if one.unread_bytes <= self._max_unread_bytes and total_bytes <= self._max_total_unread_bytes:
                break
            total_bytes -= one.unread_bytes
            del self._accounts[one.link.connection]
            found.append(one)
        return found

    def _unread(self) -> Iterator[Hoarder]:
        for connection, account in list(self._accounts.items()):
            if not _is_open(*connection):
                del self._accounts[connection]
                self.ended.append(connection)
                continue
            received_bytes = _received_bytes(connection[0], above=account.read_bytes + MIN_HOARD_BYTES)
            if received_bytes is None:
                del self._accounts[connection]
            elif received_bytes - account.read_bytes > MIN_HOARD_BYTES:
                yield Hoarder(account.link, received_bytes - account.read_bytes)


def frame_bytes(num_bytes: int) -> int:
    """What a frame of so many bytes takes on an encrypted connection."""
    sealed_bytes = num_bytes + _SEALED_BYTES
    return sealed_bytes + (2 if sealed_bytes <= _MAX_SHORT_FRAME_BYTES else 9)


def _is_open(descriptor: int, inode: int) -> bool:
    """Whether the descriptor still means this connection."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def _received_bytes(descriptor: int, *, above: int) -> int | None:
    """What this process has taken from the kernel; None when the connection has ended, or is a socket file.

    What still waits in the kernel is looked at only when it matters, above so many bytes.
    """
    try:
        received_bytes = _bytes_of_connection(descriptor)
        if received_bytes <= above:
            return received_bytes
        waiting = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except OSError:
        return None
    return received_bytes - int.from_bytes(waiting, "little")


def _bytes_of_connection(descriptor: int) -> int:
    """What the kernel has received. Raises OSError when the connection has ended, or is a socket file."""
    info = ctypes.create_string_buffer(_RECEIVED.stop)
    length = ctypes.c_uint(_RECEIVED.stop)
    # An object of the standard library would cost ten times as much, for every connection and twenty times a second.
    failed = _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
    if failed or length.value < _RECEIVED.stop:
        raise OSError
    return int.from_bytes(info.raw[_RECEIVED], "little")
