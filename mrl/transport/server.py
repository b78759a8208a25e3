"""The ROUTER socket of a daemon: encrypted, allow-listed, bounded, and never blocking on a send.

It listens on a socket file, which only its owner may open. Other hosts reach it through a `TcpProxy`, if at all.
"""

import errno
import ipaddress
import os
import socket as os_socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from mrl.errors import AddressError, RoleFailed, RunFolderError
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.transport.allow_list import AllowList, fingerprint
from mrl.transport.endpoints import WILDCARDS, reachable_host
from mrl.transport.grants import Grant
from mrl.transport.keys import RunKeys
from mrl.transport.links import SEPARATOR, Admits, Link, Links
from mrl.transport.refusals import Refusals
from mrl.transport.tcp_proxy import BACKLOG, TcpProxy

MAX_BURST_MESSAGES = 512
MAX_BURST_BYTES = 4 * 1024 * 1024
MAX_UNREAD_MESSAGES = 4
"""Most complete messages of one client that wait to be read; each may have the full length."""
MAX_UNSENT_MESSAGES = 64
"""Most messages that wait to be sent to one client. Fewer are due at once: 16 unacknowledged ones of 256 KiB, and
acknowledgements."""
HANDSHAKE_S = 5.0
WATCH_S = 0.5
"""Seconds between two looks at the allow-list."""
MAX_IPC_PATH_BYTES = 107
"""Longest path of a socket file that the kernel accepts."""
ENVELOPE_BYTES = 33
"""Bytes that CURVE adds to a message (ZeroMQ RFC 26); libzmq's limit counts both together."""
LIVENESS = {
    # ZeroMQ's own heartbeats stay off: one that is due for a link whose peer died while the receive queue was full ends
    # the process (libzmq 4.3.5, assertion `!_io_error`, its issues 4364 and 4767). The kernel notices within 30 s.
    zmq.HEARTBEAT_IVL: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    # Keepalive rests while data is unacknowledged. This also ends a link whose peer takes nothing for so long (in ms).
    zmq.TCP_MAXRT: 30_000,
}
"""Options of every socket, by which the end of a silent peer is noticed."""

_ZAP_DOMAIN = b"mrl"
_KEY_PROPERTY, _DESCRIPTOR_PROPERTY = "User-Id", "__fd"
# Failures of authentication are counted by `_Gate`, which decides them.
_HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Incoming(NamedTuple):
    """One message. `client` is a name that `grant`, proved by the sender's key, covers; answers go to it."""

    client: bytes
    body: bytes
    grant: Grant


def any_role(_grant: Grant) -> bool:
    """Admit every key of the run."""
    return True


class ServerSocket:
    """Receives messages of the clients of one run, and answers them. Used by one thread."""

    def __init__(
        self,
        keys: RunKeys,
        *,
        admits: Admits = any_role,
        host: str = "",
        port: int = 0,
        ipc_path: Path | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        handshake_s: float = HANDSHAKE_S,
        max_unread_messages: int = MAX_UNREAD_MESSAGES,
        max_connections: int | None = None,
    ) -> None:
        """Listen on the socket file `ipc_path`, and with a `host` also at that TCP address; port 0 takes a free one.

        The file is 0600 in a folder that is made 0700. Without a path, or with one that is too long, it lies in a
        temporary folder of its own, and the attribute `ipc_path` gives the path. Over TCP there are at most
        `max_connections`, by default as many as leave half of this process's descriptors to others.

        Raises AddressError when either cannot be bound, RunFolderError when the allow-list cannot be read.
        """
        self.refusals = Refusals()
        """Refusals by reason: unknown_key, revoked_key, role, handshake, impersonation, unnamed, frames; of TCP
        connections also crowd, full and busy."""
        self._allowed = AllowList(keys.folder)
        self._links = Links(self._allowed, admits)
        self._watch_s = time.monotonic() + WATCH_S
        self._front: TcpProxy | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._context = zmq.Context()
        self._authenticator = _authenticator(self._context, _Gate(self._links, self.refusals))
        self._socket = _router(self._context, keys, max_message_bytes, max_unread_messages, handshake_s)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILURES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self.ipc_path = self._short(ipc_path)
        try:
            self._bind_file()
            self.address = self._bind_tcp(host, port, max_connections) if host else f"ipc://{self.ipc_path}"
        except AddressError:
            self.close()
            raise

    def receive(self, timeout_s: float) -> list[Incoming]:
        """Wait at most `timeout_s` or half a second, then return the messages there: at most 512, or 4 MiB.

        A message longer than that comes alone or last. Raises RoleFailed where the TCP port accepts no connection any
        more.
        """
        if self._front is not None and self._front.failure is not None:
            raise RoleFailed(f"the listener at {self.address} has stopped") from self._front.failure
        ready = dict(self._poller.poll(max(0, round(min(timeout_s, WATCH_S) * 1000))))
        if time.monotonic() >= self._watch_s:
            self._watch_s = time.monotonic() + WATCH_S
            self.reload()
            self.refusals.settle()
        if self._monitor in ready:
            self._count_failures()
        return self._drain() if self._socket in ready else []

    def wake_on(self, descriptor: int) -> None:
        """Let `receive` return at once whenever this file descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send(self, client: bytes, body: bytes) -> bool:
        """Queue `body` for one client; return False when that client is gone or too slow."""
        routing = self._links.route(client)
        if routing is None:
            return False
        try:
            self._socket.send(routing, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def reload(self) -> None:
        """Read the allow-list if it has changed, and end the links of keys that it no longer allows.

        A list that cannot be read is counted as a refusal, and the one before stays in force.
        """
        try:
            if not self._allowed.reload():
                return
        except RunFolderError as error:
            self.refusals.note("allow_list", "allow-list", error=str(error))
            return
        for link in self._links.drop_refused():
            self.refusals.note("revoked_key", fingerprint(link.key), name=link.grant.name)
            _cut(link.connection)

    def close(self) -> None:
        """Stop listening, and drop queued messages."""
        if self._context.closed:
            return
        if self._front is not None:
            self._front.close()
        self._authenticator.stop()
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
        with suppress(OSError):  # its folder may be gone, or belong to another user
            self.ipc_path.unlink(missing_ok=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _short(self, path: Path | None) -> Path:
        if path is not None and len(os.fsencode(path)) <= MAX_IPC_PATH_BYTES:
            return path
        self._temporary = tempfile.TemporaryDirectory(prefix="mrl-socket-", ignore_cleanup_errors=True)
        return Path(self._temporary.name) / (path.name[:16] if path else "socket")

    def _bind_file(self) -> None:
        """Bind the socket file. Raises AddressError."""
        path = self.ipc_path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.chmod(0o700)  # before the socket is there, which is made with the process's mask
            self._socket.bind(f"ipc://{path}")
            path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            cure = "set run.local_folder to a writable folder of this host with a short path"
            raise AddressError(f"cannot listen: {error.strerror}", where=str(path), cure=cure) from error

    def _bind_tcp(self, host: str, port: int, max_connections: int | None) -> str:
        """Listen over TCP and return the address for other hosts. Raises AddressError."""

        def refused(reason: str, address: str) -> None:
            self.refusals.note(reason, address)

        try:
            self._front = TcpProxy(
                _bindable(host), port, self.ipc_path, refused=refused, max_connections=max_connections
            )
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
            raise _address_error(host, port, error) from error
        return f"tcp://{reachable_host(host) if host in WILDCARDS else _bindable(host)}:{self._front.port}"

    def _drain(self) -> list[Incoming]:
        received: list[Incoming] = []
        num_bytes = 0
        take, known = self._socket.recv, self._links.known
        for _ in range(MAX_BURST_MESSAGES):  # dropped ones count, or a flood of them would hold the caller
            if num_bytes >= MAX_BURST_BYTES:
                break
            try:
                routing = take(zmq.NOBLOCK)
            except zmq.Again:
                break
            # Only an uncopied frame tells whose key sent it. The frames of a message arrive together.
            body = take(zmq.NOBLOCK, copy=False)
            num_bytes += len(body)
            key = str(body.get(_KEY_PROPERTY))
            link = known(routing, key) or self._admit(routing, key, body)
            if body.more:
                num_bytes += self._skip_frames(key)
            elif link is not None:
                received.append(Incoming(link.client, body.bytes, link.grant))
        return received

    def _skip_frames(self, key: str) -> int:
        """Take the rest of a message of more than one body frame; return its bytes."""
        self.refusals.note("frames", fingerprint(key))
        num_bytes, more = 0, True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            num_bytes, more = num_bytes + len(frame), frame.more
        return num_bytes

    def _admit(self, routing: bytes, key: str, body: zmq.Frame) -> Link | None:
        connection = _connection(int(body.get(_DESCRIPTOR_PROPERTY)))
        found = self._links.admit(routing, key, connection)
        if isinstance(found, Link):
            return found
        grant = self._allowed.find(key)
        claims = ascii(routing.partition(SEPARATOR)[0][:64])  # never the nonce, nor a terminal's control characters
        self.refusals.note(found, fingerprint(key), name=grant.name if grant else "", claims=claims)
        if found not in ("impersonation", "unnamed"):
            _cut(connection)
        return None

    def _count_failures(self) -> None:
        for _ in range(MAX_BURST_MESSAGES):
            if not self._monitor.poll(0):
                return
            parse_monitor_message(self._monitor.recv_multipart())
            self.refusals.note("handshake", "a connection")


class _Gate:
    """Tells the authenticator, on the authenticator's thread, whether a key may connect."""

    def __init__(self, links: Links, refusals: Refusals) -> None:
        self._links, self._refusals = links, refusals

    def callback(self, _domain: str, key: bytes) -> bool:
        public = key.decode("ascii", errors="replace")
        reason = self._links.refusal(public)
        if reason:
            self._refusals.note(reason, fingerprint(public))
        return not reason


def _authenticator(context: zmq.Context, gate: _Gate) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN.decode(), credentials_provider=gate)
    return authenticator


def _router(
    context: zmq.Context, keys: RunKeys, max_message_bytes: int, max_unread_messages: int, handshake_s: float
) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    options = {
        zmq.CURVE_SERVER: 1,
        zmq.CURVE_PUBLICKEY: keys.server_public,
        zmq.CURVE_SECRETKEY: keys.server_secret,
        zmq.ZAP_DOMAIN: _ZAP_DOMAIN,
        zmq.ZAP_ENFORCE_DOMAIN: 1,
        zmq.HANDSHAKE_IVL: round(handshake_s * 1000),
        zmq.BACKLOG: BACKLOG,
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: max_message_bytes + ENVELOPE_BYTES,
        zmq.RCVHWM: max_unread_messages,
        zmq.SNDHWM: MAX_UNSENT_MESSAGES,
        # Without MANDATORY an undeliverable message vanishes silently; without HANDOVER a client that comes back over
        # a half-open link is locked out until the old link times out.
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 1,
    }
    for option, value in (options | LIVENESS).items():
        router.setsockopt(option, value)
    return router


def _connection(descriptor: int) -> tuple[int, int]:
    """Return descriptor and inode, which together identify the connection even after the descriptor's reuse."""
    try:
        return descriptor, os.fstat(descriptor).st_ino
    except OSError:  # closed since
        return -1, -1


def _cut(connection: tuple[int, int]) -> None:
    """End a connection under the socket, which offers no way to do so. A client with a refused key cannot come back."""
    descriptor, inode = connection
    with suppress(OSError):
        if descriptor >= 0 and os.fstat(descriptor).st_ino == inode:
            with os_socket.socket(fileno=os.dup(descriptor)) as same:
                same.shutdown(os_socket.SHUT_RDWR)


def check_address(host: str, port: int) -> None:
    """Bind `host:port` and let go of it. Raises AddressError when a server could not listen there."""
    try:
        with os_socket.socket() as probe:
            probe.setsockopt(os_socket.SOL_SOCKET, os_socket.SO_REUSEADDR, 1)
            probe.bind((_bindable(host), port))
            probe.listen(1)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
        raise _address_error(host, port, error) from error


def _bindable(host: str) -> str:
    """Return the address to bind: ZeroMQ binds literal addresses and interfaces only, so names are resolved here."""
    if host in WILDCARDS:
        return "0.0.0.0"
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return os_socket.gethostbyname(host)


def _address_error(host: str, port: int, error: Exception) -> AddressError:
    number = getattr(error, "errno", None)
    reason = (
        "the port is already in use" if number == errno.EADDRINUSE else getattr(error, "strerror", None) or str(error)
    )
    about_port = number in (errno.EADDRINUSE, errno.EACCES)  # a low port needs a right that few have
    cure = "set another port, or port = 0 for a free one" if about_port else "set host to an address of this machine"
    return AddressError(f"cannot listen: {reason}", where=f"{host}:{port}", cure=cure)
