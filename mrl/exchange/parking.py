"""Puts that wait for room: in the order of their arrival, within a bound of bytes."""

from collections import Counter

from mrl.records.exchange_messages import Put

MAX_PARKED_BYTES = 8 * 1024 * 1024
PUT_BYTES, PACK_BYTES = 512, 512
"""What a Put weighs beside its packs, and a pack beside its records and the hashes of their ids."""


class Parking:
    """A queue without doubles. What does not fit is let go: its sender puts it again."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], Put] = {}
        self._num_bytes = 0

    @property
    def num_waiting(self) -> int:
        """How many Puts."""
        return len(self._waiting)

    def counts(self) -> Counter[bytes]:
        """How many Puts of every client that has some here."""
        return Counter(client for client, _ in self._waiting)

    def park(self, client: bytes, message: Put) -> None:
        """Let a Put wait at the end of the queue, unless it waits already."""
        if (client, message.seq) not in self._waiting and self._num_bytes + _num_bytes(message) <= MAX_PARKED_BYTES:
            self._waiting[client, message.seq] = message
            self._num_bytes += _num_bytes(message)

    def first(self) -> tuple[bytes, Put] | None:
        """(client, Put) at the head of the queue."""
        return next(((client, message) for (client, _), message in self._waiting.items()), None)

    def leave(self) -> tuple[bytes, Put]:
        """Take the head off the queue. Raises StopIteration when nothing waits."""
        client, seq = next(iter(self._waiting))
        return client, self._remove(client, seq)

    def forget(self, client: bytes) -> None:
        """What this client has put waits no longer."""
        for waiting, seq in [key for key in self._waiting if key[0] == client]:
            self._remove(waiting, seq)

    def _remove(self, client: bytes, seq: int) -> Put:
        message = self._waiting.pop((client, seq))
        self._num_bytes -= _num_bytes(message)
        return message


def _num_bytes(message: Put) -> int:
    hashes_bytes = sum(len(pack.id_hashes) for pack in message.packs)
    return message.num_bytes + hashes_bytes + PUT_BYTES + PACK_BYTES * len(message.packs)
