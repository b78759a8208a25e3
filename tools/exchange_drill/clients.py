"""A bare client of the exchange daemon, which sends whatever it wants and reads only when it wants to."""

import time
from pathlib import Path

import msgspec
import zmq

from mrl.errors import RecordError
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import DaemonMessage, Hello, Stat, StatRequest, daemon_message_decoder
from mrl.transport.endpoints import read_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys
from mrl.transport.links import routing_id

ANSWER_S = 10.0


class BareClient:
    """A ZeroMQ DEALER socket with the key of `name`, and with queues as short as possible at its own end."""

    def __init__(self, run: Path, name: str) -> None:
        self.name = name
        own = load_client_keys(run / "keys", grant_of(name))
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        options: dict[int, int | bytes] = {
            zmq.IDENTITY: routing_id(name),
            zmq.LINGER: 0,
            zmq.SNDHWM: 4,
            zmq.RCVHWM: 1,
            zmq.RCVBUF: 4096,
            zmq.IMMEDIATE: 1,
            zmq.CURVE_SERVERKEY: own.server_public,
            zmq.CURVE_PUBLICKEY: own.public,
            zmq.CURVE_SECRETKEY: own.secret,
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        address = read_endpoint(run / "endpoints", "exchange")
        assert address is not None
        self.socket.connect(address)

    def hello(self, policy: str) -> DaemonMessage | None:
        """Say Hello; return the answer, or None when there is none."""
        self.send(Hello(client=self.name, policy=policy))
        return self.answer()

    def send(self, message: msgspec.Struct | bytes, *, timeout_s: float = ANSWER_S) -> bool:
        """Send a message; return False when the daemon takes nothing within this time."""
        body = message if isinstance(message, bytes) else encode(message)
        if not self.socket.poll(round(timeout_s * 1000), zmq.POLLOUT):
            return False
        try:
            self.socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answer(self, *, timeout_s: float = ANSWER_S) -> DaemonMessage | None:
        """Return the daemon's next message; None when none comes within this time or it cannot be decoded."""
        if not self.socket.poll(round(timeout_s * 1000)):
            return None
        try:
            return decode(self.socket.recv(), daemon_message_decoder)
        except RecordError:
            return None

    def close(self) -> None:
        """Close the socket and drop its queues."""
        self._context.destroy(linger=0)


def stat_of(run: Path) -> Stat:
    """Ask the daemon for its Stat. Raises RuntimeError when it does not answer within `ANSWER_S`."""
    client = BareClient(run, "admin")
    end_s = time.monotonic() + ANSWER_S
    try:
        while time.monotonic() < end_s:
            client.send(StatRequest(client="admin"), timeout_s=1.0)
            found = client.answer(timeout_s=1.0)
            if isinstance(found, Stat):
                return found
        raise RuntimeError(f"the daemon does not answer within {ANSWER_S:g} s")
    finally:
        client.close()
