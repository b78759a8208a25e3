"""The daemon's memory of one client: its policy, and the records that it was given and has not acknowledged."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry

FORGET_AFTER_S = 60.0
"""Seconds of silence after which a client is forgotten."""
CLAIM_S = 3.0
"""Seconds in which a client has to acknowledge a delivery, or to take over a request."""
MAX_TRIES = 5
"""Number of times that a shipment is sent before it is given up."""


@dataclass(slots=True)
class Shipment:
    """Records that go to a client in one message: a part of the answer to Fetch `seq`, or of none (0)."""

    numbers: Sequence[int]
    """Numbers of the records; those that are held no longer are left out when the message goes."""
    num_bytes: int
    seq: int = 0
    part: int = 1
    parts: int = 1
    due_s: float = 0.0
    """Clock time at which the shipment is sent again."""
    tries: int = 1


@dataclass(slots=True)
class Allowance:
    """Bytes that all clients together have not acknowledged."""

    used_bytes: int = 0


@dataclass(slots=True)
class Session:
    """A client that said Hello."""

    name: str
    policy: str
    heard_s: float
    """Clock time of the client's last message."""
    limits: Limits
    allowance: Allowance
    """Count of unacknowledged bytes that all sessions share."""
    abandoned: int = 0
    """Records whose delivery was given up: sent too often, or too many in the queue."""
    unacknowledged_bytes: int = 0
    num_queued: int = 0
    """Records that wait until earlier ones are acknowledged, or until the client has room."""
    is_full: bool = False
    """Whether the client takes nothing at present, by its own word."""
    _last_fetch: int = 0
    """Highest number of a Fetch so far."""
    _sent: dict[int, Shipment] = field(default_factory=dict)
    """Delivery number -> shipment, in order of `due_s`."""
    _queue: deque[Shipment] = field(default_factory=deque)
    _is_stuck: bool = False
    """Whether nothing was acknowledged since a shipment was sent again."""

    @property
    def num_unacknowledged(self) -> int:
        """Records that were sent and not acknowledged."""
        return sum(len(shipment.numbers) for shipment in self._sent.values())

    def is_silent(self, now_s: float) -> bool:
        """Whether the client was silent for so long that it can be forgotten; living clients ping every second."""
        return now_s - self.heard_s > FORGET_AFTER_S

    def is_new_fetch(self, seq: int) -> bool:
        """Note a Fetch; return whether it comes for the first time. A repeated one has no new highest number."""
        is_new = seq == 0 or seq > self._last_fetch
        self._last_fetch = max(seq, self._last_fetch)
        return is_new

    def queue(self, shipments: Iterable[Shipment]) -> None:
        """Queue shipments, to be sent as earlier ones are acknowledged. A repeated answer replaces what waits of it."""
        for shipment in shipments:
            if shipment.seq and shipment.part == 1:
                self._queue = deque(waiting for waiting in self._queue if waiting.seq != shipment.seq)
                self.num_queued = sum(len(waiting.numbers) for waiting in self._queue)
            if self.num_queued + len(shipment.numbers) > self.limits.queued_records and self._queue:
                self.abandoned += len(shipment.numbers)
            else:
                self._queue.append(shipment)
                self.num_queued += len(shipment.numbers)

    def next_shipment(self, delivery: int, now_s: float) -> Shipment | None:
        """Return the shipment to send now, as this delivery. None when none waits, or too much is unacknowledged."""
        if self.is_full or not self._queue or not self._may_send(self._queue[0].num_bytes):
            return None
        shipment = self._queue.popleft()
        self.num_queued -= len(shipment.numbers)
        shipment.due_s = now_s + CLAIM_S
        self._sent[delivery] = shipment
        self._account(shipment.num_bytes)
        return shipment

    def acknowledge(self, deliveries: Iterable[int]) -> None:
        """End deliveries that the client has taken over."""
        for delivery in deliveries:
            shipment = self._sent.pop(delivery, None)
            if shipment is not None:
                self._account(-shipment.num_bytes)
                self._is_stuck = False

    def note_room(self, *, is_full: bool) -> None:
        """Note whether the client is full. If so, put what it has not acknowledged back at the head of the queue.

        A client that is full has not failed to acknowledge, so that the tries count anew.
        """
        self.is_full = is_full
        if not is_full:
            return
        for shipment in reversed(self._sent.values()):
            shipment.tries = 1
            self._queue.appendleft(shipment)
            self.num_queued += len(shipment.numbers)
        self._sent.clear()
        self._account(-self.unacknowledged_bytes)

    def overdue(self, now_s: float) -> list[tuple[int, Shipment]]:
        """Return deliveries to send again under the same numbers; give up those that were sent often enough.

        A client that does not acknowledge probably reads too slowly: after the first time, only one delivery comes
        again until something is acknowledged.
        """
        due = [item for item in self._sent.items() if item[1].due_s <= now_s]
        again: list[tuple[int, Shipment]] = []
        for delivery, shipment in due:
            del self._sent[delivery]
            if shipment.tries >= MAX_TRIES:
                self.abandoned += len(shipment.numbers)
                self._account(-shipment.num_bytes)
                continue
            shipment.due_s = now_s + CLAIM_S
            self._sent[delivery] = shipment
            if not (self._is_stuck and again):
                shipment.tries += 1
                again.append((delivery, shipment))
        self._is_stuck |= bool(again)
        return again

    def end(self) -> int:
        """End the session; return the number of records that the client was not given after all."""
        self._account(-self.unacknowledged_bytes)
        self._sent.clear()
        return self.abandoned

    def _may_send(self, num_bytes: int) -> bool:
        if not self.unacknowledged_bytes:
            return True
        is_within_all = self.allowance.used_bytes + num_bytes <= self.limits.all_unacknowledged_bytes
        return is_within_all and self.unacknowledged_bytes + num_bytes <= self.limits.unacknowledged_bytes

    def _account(self, num_bytes: int) -> None:
        self.unacknowledged_bytes += num_bytes
        self.allowance.used_bytes += num_bytes


def shipments_of(entries: Sequence[Entry], max_bytes: int, *, seq: int = 0) -> list[Shipment]:
    """Return the entries in shipments of at most `max_bytes`, or one longer record each; with a `seq` at least one."""
    parts: list[list[Entry]] = [[]]
    part_bytes = 0
    for entry in entries:
        if parts[-1] and part_bytes + len(entry.body) > max_bytes:
            parts.append([])
            part_bytes = 0
        parts[-1].append(entry)
        part_bytes += len(entry.body)
    if not entries and not seq:
        return []
    return [
        Shipment([entry.number for entry in part], sum(len(entry.body) for entry in part), seq, place, len(parts))
        for place, part in enumerate(parts, 1)
    ]
