"""What the exchange's client needs of the connection below it."""

from collections.abc import Callable
from typing import Protocol


class Link(Protocol):
    """The part of `mrl.transport.background.BackgroundClient` that the client uses."""

    def post(self, body: bytes) -> bool:
        """Queue a message."""

    def request_reconnect(self) -> None:
        """Look up the daemon's address again."""

    def close(self, timeout_s: float) -> None:
        """End the link."""


OpenLink = Callable[[Callable[[bytes], None], Callable[[float], None]], Link]
"""Makes the link from (on_message, on_tick)."""
