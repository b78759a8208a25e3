"""Links without encryption, so that the price of CURVE can be measured. No part of the product, which has no such way.

The options that turn CURVE on are left out on every socket of this process. Without it no key proves who a client is:
the name that a client gives itself stands for its grant.
"""

from typing import Any

import zmq

from mrl.transport import server
from mrl.transport.grants import Grant, grant_of
from mrl.transport.links import SEPARATOR, Admits, Link, Links

CURVE_OPTIONS = {zmq.CURVE_SERVER, zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY}


class PlainSocket(zmq.Socket):
    """A socket that cannot be told to encrypt."""

    def setsockopt(self, option: int, value: Any) -> None:
        """Leaves out what CURVE needs."""
        if option not in CURVE_OPTIONS:
            super().setsockopt(option, value)


class _Claimed:
    """An allow-list by which everybody is who he says he is."""

    def __init__(self) -> None:
        self.grant = Grant("exchange")

    def find(self, _public: str) -> Grant:
        return self.grant

    def is_revoked(self, _public: str) -> bool:
        return False


class ClaimedLinks(Links):
    """Lets every connection in under the grant that its name needs."""

    def __init__(self, _allowed: object, admits: Admits) -> None:
        self._claimed = _Claimed()
        super().__init__(self._claimed, admits)  # type: ignore[arg-type]

    def admit(self, routing: bytes, key: str, connection: tuple[int, int]) -> Link | str:
        """As for a key with just this grant."""
        self._claimed.grant = grant_of(routing.partition(SEPARATOR)[0].decode())
        return super().admit(routing, key, connection)


def use() -> None:
    """From now on, in this process."""
    zmq.Context._socket_class = PlainSocket  # type: ignore[misc]
    server.Links = ClaimedLinks  # type: ignore[assignment, misc]
