"""The TCP port of a server: a thread that accepts a bounded number of connections, and passes their bytes on.

ZeroMQ accepts every connection that the kernel offers it, until its process has no file descriptor left for anything
else. So ZeroMQ has no port of its own: this thread stands before the server's socket file, and a connection that is not
accepted here costs the server nothing. A connection in the middle of its handshake is a stranger. Strangers have a
bound of their own. Beyond it a new stranger displaces the oldest of the address that has most of them: a crowd neither
fills the table nor keeps others out.
"""

import os
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

BACKLOG = 256
"""Connections that the kernel keeps until they are accepted, here and at the socket file."""
MAX_CONNECTIONS = 4096
MAX_STRANGERS = 256
READ_BYTES = 256 * 1024
"""Most bytes held of one connection, in each direction."""
TAKEN_AT_ONCE = 16
PAUSE_S = 0.01
"""Seconds between two looks at the port while the bound of strangers is reached, so that a crowd costs little time."""
LET_IN_BYTES = 64 + 170 + 32
"""Bytes that the server sends to no stranger: greeting, WELCOME, and more than the ERROR for a refused key."""
DESCRIPTORS_EACH = 3
"""Descriptors of one connection: at the port, to the socket file, and behind it."""
KEEPALIVE = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 15),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 5),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 3),
    socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 30_000),
    socket.TCP_NODELAY: (socket.IPPROTO_TCP, 1),
}
"""Socket options by which the end of a silent peer is noticed within half a minute, also of one that reads nothing."""

Refused = Callable[[str, str], None]
"""Takes the reason and the address of a connection that is not accepted, or not kept."""


def most_connections() -> int:
    """Return the most connections of one port: half of this process's descriptors at most; its files need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft // (2 * DESCRIPTORS_EACH)))


class _End:
    """One of the two sockets of a connection, with bytes read from the other socket and not yet sent on this one."""

    def __init__(self, own: socket.socket, connection: "_Connection") -> None:
        self.own, self.connection = own, connection
        self.waiting = memoryview(b"")
        self.events = 0

    @property
    def other(self) -> "_End":
        """The other socket of the connection."""
        ends = self.connection.ends
        return ends[1] if ends[0] is self else ends[0]

    def take(self, data: memoryview) -> int:
        """Send as much of `data` as the socket takes now, keep the rest, and return the bytes sent. Raises OSError."""
        try:
            taken = self.own.send(data)
        except BlockingIOError:
            taken = 0
        self.waiting = data[taken:]
        return taken


class _Connection:
    def __init__(self, outer: socket.socket, inner: socket.socket, address: str) -> None:
        self.address = address
        self.ends = (_End(outer, self), _End(inner, self))
        self.said_bytes = 0
        """Bytes that the server sent."""


class TcpProxy:
    """Listens at `host:port` for the server behind a socket file, on a thread of its own, until `close`."""

    def __init__(
        self, host: str, port: int, socket_file: Path, *, refused: Refused, max_connections: int | None = None
    ) -> None:
        """`host` is a numeric address; port 0 takes a free one. Raises OSError."""
        self._file, self._refused = str(socket_file), refused
        self._max = max_connections or most_connections()
        self._max_strangers = max(1, min(MAX_STRANGERS, self._max // 2))
        self._listener = socket.create_server((host, port), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: dict[_Connection, None] = {}
        self._known: set[_Connection] = set()
        self.failure: Exception | None = None
        """The error that ended the thread; None while it listens, and after `close`."""
        self._resume_s = 0.0
        """Time at which the thread watches the port again; 0 while it watches."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tcp-front", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        os.close(self._wake_writer)  # the thread sees the end of the pipe
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:  # noqa: BLE001 - the thread's outer edge: the server's own thread raises it
            self.failure = error
        finally:
            for connection in (*self._strangers, *self._known):
                self._end(connection)
            self._selector.close()
            self._listener.close()
            os.close(self._wake_reader)

    def _round(self) -> bool:
        """Wait once and handle the events; return False when it is time to end."""
        timeout_s = max(0.0, self._resume_s - time.monotonic()) if self._resume_s else None
        ready = self._selector.select(timeout_s)
        if self._resume_s and time.monotonic() >= self._resume_s:
            self._resume_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, mask in ready:
            if key.fd == self._wake_reader:
                return False
            if isinstance(key.data, _End):
                self._serve(key.data, mask)
            else:
                self._take()
        return True

    def _take(self) -> None:
        for _ in range(TAKEN_AT_ONCE):
            try:
                outer, (address, _port) = self._listener.accept()
            except BlockingIOError:
                break
            except OSError:  # its peer has gone, or the process has no descriptor left
                self._pause()
                return
            if len(self._strangers) + len(self._known) >= self._max and not self._strangers:
                self._refused("full", address)
                outer.close()
            else:
                self._begin(outer, address)
        if len(self._strangers) >= self._max_strangers:
            self._pause()

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._resume_s = time.monotonic() + PAUSE_S

    def _begin(self, outer: socket.socket, address: str) -> None:
        total = len(self._strangers) + len(self._known)
        if len(self._strangers) >= self._max_strangers or total >= self._max:
            self._displace()
        with ExitStack() as refused:
            refused.callback(self._refused, "busy", address)
            refused.enter_context(outer)
            try:
                inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                refused.enter_context(inner)
                inner.connect(self._file)
                outer.setblocking(False)
                for option, (level, value) in KEEPALIVE.items():
                    outer.setsockopt(level, option, value)
            except OSError:  # the server ends, no descriptor is left, or more come at once than it can take
                return
            refused.pop_all()
        connection = _Connection(outer, inner, address)
        self._strangers[connection] = None
        for end in connection.ends:
            self._watch(end)

    def _displace(self) -> None:
        """End the oldest stranger of the address that has most of them."""
        [(address, _)] = Counter(one.address for one in self._strangers).most_common(1)
        self._refused("crowd", address)
        self._end(next(one for one in self._strangers if one.address == address))

    def _serve(self, end: _End, mask: int) -> None:
        connection = end.connection
        if connection not in self._known and connection not in self._strangers:
            return  # an earlier event of this round ended it
        try:
            if mask & selectors.EVENT_WRITE:
                end.take(end.waiting)
            is_open = self._pass_on(end) if mask & selectors.EVENT_READ and not end.other.waiting else True
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if not is_open:
            self._end(connection)
            return
        for one in connection.ends:
            self._watch(one)

    def _pass_on(self, end: _End) -> bool:
        """Read once and pass the bytes to the other side; return False at the end of the stream. Raises OSError."""
        data = end.own.recv(READ_BYTES)
        if not data:
            return False
        end.other.take(memoryview(data))
        connection = end.connection
        if end is connection.ends[1] and connection in self._strangers:
            connection.said_bytes += len(data)
            if connection.said_bytes > LET_IN_BYTES:
                del self._strangers[connection]
                self._known.add(connection)
        return True

    def _watch(self, end: _End) -> None:
        """Watch a socket: read only while the other side has no bytes left to send, write only while bytes wait."""
        events = 0 if end.other.waiting else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if end.waiting else 0
        if events == end.events:
            return
        if end.events and events:
            self._selector.modify(end.own, events, end)
        elif events:
            self._selector.register(end.own, events, end)
        else:
            self._selector.unregister(end.own)
        end.events = events

    def _end(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        self._known.discard(connection)
        for end in connection.ends:
            with suppress(KeyError, ValueError):
                self._selector.unregister(end.own)
            end.own.close()
