"""The ROUTER socket of a daemon: encrypted, allow-listed, bounded, and never blocking on a send."""

import errno
import ipaddress
import socket as os_socket

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from mrl.errors import AddressError
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.transport.keys import RunKeys

MAX_BURST_MESSAGES = 512
MAX_BURST_BYTES = 64 * 1024 * 1024
HEARTBEAT_IVL_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
HANDSHAKE_IVL_MS = 5000

_ZAP_DOMAIN = b"mrl"
_WILDCARDS = ("*", "0.0.0.0", "::")
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class ServerSocket:
    """Receives from and answers to the clients of one run. Used by one thread."""

    def __init__(
        self, keys: RunKeys, *, host: str = "127.0.0.1", port: int = 0, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """Bind `host:port`; port 0 takes a free one. Raises AddressError when that cannot be done."""
        self.malformed = 0
        """Messages dropped because they had another number of frames than two (identity and body)."""
        self.refused_handshakes = 0
        """Connections refused: unknown key, no CURVE, or no ZeroMQ at all."""
        self._context = zmq.Context()
        self._authenticator = _allow_only(self._context, keys.client_public)
        self._socket = _router(self._context, keys, max_message_bytes)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILURES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.bind(f"tcp://{_bindable(host)}:{port}")
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise _address_error(host, port, error) from error
        self.address = _reachable(self._socket.get_string(zmq.LAST_ENDPOINT), host)

    def receive(self, timeout_s: float) -> list[tuple[bytes, bytes]]:
        """Wait at most `timeout_s`, then take what is there: (client identity, body), at most 512 or 64 MiB."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._monitor in ready:
            self._count_failures()
        return self._drain() if self._socket in ready else []

    def send(self, identity: bytes, body: bytes) -> bool:
        """Queue `body` for one client; False when that client is gone or does not keep up."""
        try:
            self._socket.send_multipart((identity, body), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Stop listening; what is still queued is dropped."""
        if not self._context.closed:
            self._authenticator.stop()
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    def _drain(self) -> list[tuple[bytes, bytes]]:
        received: list[tuple[bytes, bytes]] = []
        num_bytes = 0
        while len(received) < MAX_BURST_MESSAGES and num_bytes < MAX_BURST_BYTES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 2:
                received.append((frames[0], frames[1]))
                num_bytes += len(frames[1])
            else:
                self.malformed += 1
        return received

    def _count_failures(self) -> None:
        while self._monitor.poll(0):
            parse_monitor_message(self._monitor.recv_multipart())
            self.refused_handshakes += 1


class _OneKey:
    """Answers the authenticator: only this client key may connect."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._client_public


def _allow_only(context: zmq.Context, client_public: bytes) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN.decode(), credentials_provider=_OneKey(client_public))
    return authenticator


def _router(context: zmq.Context, keys: RunKeys, max_message_bytes: int) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    options = {
        zmq.CURVE_SERVER: 1,
        zmq.CURVE_PUBLICKEY: keys.server_public,
        zmq.CURVE_SECRETKEY: keys.server_secret,
        zmq.ZAP_DOMAIN: _ZAP_DOMAIN,
        zmq.ZAP_ENFORCE_DOMAIN: 1,
        zmq.HANDSHAKE_IVL: HANDSHAKE_IVL_MS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_IVL_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.RCVHWM: 64,
        zmq.SNDHWM: 256,
        # Without MANDATORY an undeliverable message vanishes silently; without HANDOVER a client that comes back over
        # a half-open link is locked out until the old link times out.
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 1,
    }
    for option, value in options.items():
        router.setsockopt(option, value)
    return router


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
    """ZeroMQ binds literal addresses and interfaces only, so names are resolved here."""
    if host in _WILDCARDS:
        return "0.0.0.0"
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return os_socket.gethostbyname(host)


def _reachable(endpoint: str, host: str) -> str:
    port = endpoint.rpartition(":")[2]
    return f"tcp://{os_socket.gethostname()}:{port}" if host in _WILDCARDS else endpoint


def _address_error(host: str, port: int, error: Exception) -> AddressError:
    number = getattr(error, "errno", None)
    reason = "the port is busy" if number == errno.EADDRINUSE else getattr(error, "strerror", None) or str(error)
    about_port = number in (errno.EADDRINUSE, errno.EACCES)  # a low port needs a right that few have
    cure = "set another port, or port = 0 for a free one" if about_port else "set host to an address of this machine"
    return AddressError(f"cannot listen: {reason}", where=f"{host}:{port}", cure=cure)
