"""What a socket was given to send and the kernel has not taken yet: it lies in the memory of this process.

A high-water mark counts messages and not bytes. A client that reads nothing would hold as many of the longest ones.
"""

from collections import deque
from typing import Protocol

MIN_TRACKED_BYTES = 8 * 1024
"""Shorter messages are not counted: the high-water mark bounds them."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""To one client, beside one message of any length."""
MAX_TOTAL_UNSENT_BYTES = 32 * 1024 * 1024
"""To all clients, beside one message each. As much as the exchange sends to all that they have not acknowledged."""


class Tracker(Protocol):
    """Knows what became of a message; zmq.MessageTracker is one."""

    @property
    def done(self) -> bool:
        """Whether it was handed to the kernel, or dropped."""


class Unsent:
    """Messages under way by client. Used by one thread."""

    def __init__(self, *, max_bytes: int = MAX_UNSENT_BYTES, max_total_bytes: int = MAX_TOTAL_UNSENT_BYTES) -> None:
        self._max_bytes, self._max_total_bytes = max_bytes, max_total_bytes
        self._waiting: dict[bytes, deque[tuple[int, Tracker]]] = {}
        self._sums: dict[bytes, int] = {}
        self.total_bytes = 0

    def admits(self, client: bytes, num_bytes: int) -> bool:
        """Whether so many bytes more may be sent to this client now. One message is always allowed."""
        self._settle(client)
        if client not in self._waiting:
            return True
        if self.total_bytes + num_bytes > self._max_total_bytes:
            for other in list(self._waiting):
                self._settle(other)
        own_bytes = self._sums.get(client, 0)
        return own_bytes + num_bytes <= self._max_bytes and self.total_bytes + num_bytes <= self._max_total_bytes

    def note(self, client: bytes, num_bytes: int, tracker: Tracker) -> None:
        """A message to this client is under way."""
        self._waiting.setdefault(client, deque()).append((num_bytes, tracker))
        self._add(client, num_bytes)

    def _settle(self, client: bytes) -> None:
        """Messages leave in their order, so those behind the first that waits wait too."""
        waiting = self._waiting.get(client, deque())
        while waiting and waiting[0][1].done:
            self._add(client, -waiting.popleft()[0])
        if not waiting and client in self._waiting:
            del self._waiting[client], self._sums[client]

    def _add(self, client: bytes, num_bytes: int) -> None:
        self._sums[client] = self._sums.get(client, 0) + num_bytes
        self.total_bytes += num_bytes
