"""What the daemon remembers about one client: who it is, and what it was given and has not acknowledged."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry

FORGET_AFTER_S = 60.0
CLAIM_S = 3.0
MAX_TRIES = 5


@dataclass(slots=True)
class Shipment:
    """Records that go to a client in one message: one of `parts` that answer the Fetch `seq`, or none's answer (0)."""

    numbers: Sequence[int]
    """Of the records; those that are held no longer are left out when it goes."""
    num_bytes: int
    seq: int = 0
    part: int = 1
    parts: int = 1
    due_s: float = 0.0
    """When it is sent again."""
    tries: int = 1


@dataclass(slots=True)
class Allowance:
    """What clients have not acknowledged, all together."""

    used_bytes: int = 0


@dataclass(slots=True)
class Session:
    """One client that said Hello."""

    name: str
    policy: str
    heard_s: float
    limits: Limits
    allowance: Allowance
    """Shared with the other sessions."""
    abandoned: int = 0
    """Records whose delivery was given up: too many tries, or too many at once."""
    unacknowledged_bytes: int = 0
    num_queued: int = 0
    """Records that wait for acknowledgements of what was sent, or until the client has room."""
    is_full: bool = False
    """Whether the client takes nothing at present, as it says itself."""
    _last_fetch: int = 0
    _sent: dict[int, Shipment] = field(default_factory=dict)
    """By delivery number, in order of `due_s`."""
    _queue: deque[Shipment] = field(default_factory=deque)
    _is_stuck: bool = False
    """Whether nothing was acknowledged since something was sent again."""

    @property
    def num_unacknowledged(self) -> int:
        """Records that were sent and not acknowledged."""
        return sum(len(shipment.numbers) for shipment in self._sent.values())

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing was heard for so long that the client can be forgotten; living clients ping every second."""
        return now_s - self.heard_s > FORGET_AFTER_S

    def is_new_fetch(self, seq: int) -> bool:
        """Whether this Fetch comes for the first time: numbers rise, and what is sent again has an earlier one."""
        is_new = seq == 0 or seq > self._last_fetch
        self._last_fetch = max(seq, self._last_fetch)
        return is_new

    def queue(self, shipments: Iterable[Shipment]) -> None:
        """Send these as the client acknowledges earlier ones. A repeated answer replaces what waits of it."""
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
        """What may be sent now, as this delivery; None when there is nothing, or too much is unacknowledged."""
        if self.is_full or not self._queue or not self._may_send(self._queue[0].num_bytes):
            return None
        shipment = self._queue.popleft()
        self.num_queued -= len(shipment.numbers)
        shipment.due_s = now_s + CLAIM_S
        self._sent[delivery] = shipment
        self._account(shipment.num_bytes)
        return shipment

    def acknowledge(self, deliveries: Iterable[int]) -> None:
        """The client has taken these over."""
        for delivery in deliveries:
            shipment = self._sent.pop(delivery, None)
            if shipment is not None:
                self._account(-shipment.num_bytes)
                self._is_stuck = False

    def note_room(self, *, is_full: bool) -> None:
        """A client that is full has not failed to acknowledge: what it was sent goes back to the head of the queue."""
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
        """What to send again under the same numbers, renewed; what was sent often enough is given up.

        Who does not acknowledge probably reads too slowly: one comes again until something is acknowledged.
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
        """Nothing is expected of the client any more. Returns how many records it was not given after all."""
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
    """The entries in shipments of bounded size; with a `seq` there is at least one."""
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
