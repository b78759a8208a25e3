"""Client that asks the exchange daemon of a run for its account, with the admin's key."""

import os
import time

from mrl.config.run_folder import RunFolder
from mrl.errors import PeerLost, RecordError
from mrl.exchange.daemon import ENDPOINT
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import Stat, StatRequest, daemon_message_decoder
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys

ANSWER_S = 2.0
"""Seconds that the daemon has to answer."""


class StatClient:
    """Connection to the exchange daemon of a run. Raises RunFolderError when the run has no key for its admin."""

    def __init__(self, run: RunFolder) -> None:
        self.name = f"admin/{os.getpid()}"
        keys = load_client_keys(run.keys, Grant("admin"))
        self._socket = ClientSocket(keys, lambda: nearest_endpoint(run.endpoints, ENDPOINT), identity=self.name)

    def ask(self) -> Stat:
        """Return the daemon's account. Raises PeerLost when none comes within 2 s."""
        end_s = time.monotonic() + ANSWER_S
        is_asked = False
        while time.monotonic() < end_s:
            is_asked = is_asked or self._socket.send(encode(StatRequest(client=self.name)))
            self._socket.wait(0.05, until_sendable=not is_asked)
            for body in self._socket.receive(0.0):
                if isinstance(answer := _read(body), Stat):
                    return answer
        raise PeerLost(f"no exchange daemon of this run answered within {ANSWER_S:.0f} s; is the run still running?")

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _read(body: bytes) -> object:
    try:
        return decode(body, daemon_message_decoder)
    except RecordError:
        return None
