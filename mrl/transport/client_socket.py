"""The DEALER socket of one client: encrypted, never blocking on a send, able to find a server that moved."""

from collections.abc import Callable

import zmq

from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.transport.keys import ClientKeys
from mrl.transport.links import routing_id
from mrl.transport.server import ENVELOPE_BYTES, HANDSHAKE_S, LIVENESS

MAX_BURST_MESSAGES = 512


class ClientSocket:
    """Talks to one server, at the address that `resolve` returns at the moment. Used by one thread."""

    def __init__(
        self,
        keys: ClientKeys,
        resolve: Callable[[], str | None],
        *,
        identity: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`identity` is unique among the server's clients, stable over reconnects, and covered by the key's grant."""
        self.max_message_bytes = max_message_bytes
        self._keys, self._resolve, self._identity = keys, resolve, identity
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._connect()

    def send(self, body: bytes) -> bool:
        """Queue `body`; return False when the server is not connected or too slow, or `body` is too large.

        The server would drop the link for a message that is too large.
        """
        if self._socket is None or len(body) > self.max_message_bytes:
            return False
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> list[bytes]:
        """Wait at most `timeout_s` for messages and return those that have arrived."""
        self.wait(timeout_s)
        received: list[bytes] = []
        while self._socket is not None and len(received) < MAX_BURST_MESSAGES:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                received.append(frames[0])
        return received

    def wait(self, timeout_s: float, *, wake_fd: int | None = None, until_sendable: bool = False) -> None:
        """Sleep until a message is there, `wake_fd` is readable, sending is possible (if asked), or the time is up."""
        if self._socket is None:
            self._connect()
        poller = zmq.Poller()
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if until_sendable else 0))
        if wake_fd is not None:
            poller.register(wake_fd, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))

    def reconnect(self) -> None:
        """Drop the link with all that is queued on it, and connect to the server's present address."""
        self._disconnect()
        self._connect()

    def close(self, linger_s: float = 0.0) -> None:
        """End the link; queued messages get at most `linger_s` to leave."""
        if not self._context.closed:
            self._context.destroy(linger=round(linger_s * 1000))
            self._socket = None

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _connect(self) -> None:
        address = self._resolve()
        if address is None:
            return
        dealer = self._context.socket(zmq.DEALER)
        options: dict[int, int | bytes] = {
            zmq.IDENTITY: routing_id(self._identity),
            zmq.CURVE_SERVERKEY: self._keys.server_public,
            zmq.CURVE_PUBLICKEY: self._keys.public,
            zmq.CURVE_SECRETKEY: self._keys.secret,
            zmq.HANDSHAKE_IVL: round(HANDSHAKE_S * 1000),
            # Messages wait in the caller's hands, not in a pipe to a server that may never come.
            zmq.IMMEDIATE: 1,
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: self.max_message_bytes + ENVELOPE_BYTES,
            zmq.RCVHWM: 256,
            zmq.SNDHWM: 64,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
        }
        for option, value in (options | LIVENESS).items():
            dealer.setsockopt(option, value)
        dealer.connect(address)
        self._socket = dealer
