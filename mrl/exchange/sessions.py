"""What the daemon remembers about one client: who it is, what it asked, what it was given and has not acknowledged."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

FORGET_AFTER_S = 60.0
CLAIM_S = 3.0
MAX_TRIES = 5
MAX_CLAIMS = 4096
MAX_SESSIONS = 4096
MAX_UNACKNOWLEDGED_BYTES = 4 * 1024 * 1024
"""Of one client."""
MAX_TOTAL_UNACKNOWLEDGED_BYTES = 16 * 1024 * 1024
"""Of all clients."""
MAX_REPEATED_BYTES = 256 * 1024
"""What is delivered again at once to a client that has acknowledged nothing since the last time."""
MAX_REMEMBERED_FETCHES = 1024

K = TypeVar("K")


def remember(remembered: dict[K, None], key: K, limit: int) -> None:
    """Remember the newest `limit` keys."""
    remembered[key] = None
    if len(remembered) > limit:
        del remembered[next(iter(remembered))]


@dataclass(slots=True)
class Allowance:
    """What many may have outstanding, each and together. One message is allowed to each at any time."""

    max_each_bytes: int
    max_total_bytes: int
    used_bytes: int = 0

    def admits(self, own_bytes: int, num_bytes: int) -> bool:
        """Whether one who has `own_bytes` outstanding may be sent so many more."""
        if not own_bytes:
            return True
        is_within_total = self.used_bytes + num_bytes <= self.max_total_bytes
        return is_within_total and own_bytes + num_bytes <= self.max_each_bytes


def unacknowledged() -> Allowance:
    """What sessions may have been sent that they have not acknowledged."""
    return Allowance(MAX_UNACKNOWLEDGED_BYTES, MAX_TOTAL_UNACKNOWLEDGED_BYTES)


@dataclass(frozen=True, slots=True)
class Shipment:
    """Records that go to a client in one message: one of `parts` that answer the Fetch `seq`, or none's answer (0)."""

    sizes: dict[str, int]
    """Record id -> bytes."""
    seq: int = 0
    part: int = 1
    parts: int = 1

    @property
    def num_bytes(self) -> int:
        """Of all its records."""
        return sum(self.sizes.values())


@dataclass(slots=True)
class _Claim:
    """A record that the client was given and has not acknowledged."""

    num_bytes: int
    due_s: float
    tries: int = 1


@dataclass(slots=True)
class Session:
    """One client that said Hello."""

    name: str
    policy: str
    heard_s: float
    allowance: Allowance = field(default_factory=unacknowledged)
    """Shared with the other sessions."""
    abandoned: int = 0
    """Deliveries given up: too many tries, or too many at once."""
    claims: dict[str, _Claim] = field(default_factory=dict)
    """By record id, in order of `due_s`."""
    _unacknowledged_bytes: int = 0
    _was_repeated: bool = False
    """Whether nothing was acknowledged since something was delivered again."""
    _shipments: deque[Shipment] = field(default_factory=deque)
    _num_queued: int = 0
    """Records in shipments."""
    _fetches: dict[int, None] = field(default_factory=dict)

    @property
    def num_queued(self) -> int:
        """Records that wait for acknowledgements of what was sent."""
        return self._num_queued

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing was heard for so long that the client can be forgotten; living clients ping every second."""
        return now_s - self.heard_s > FORGET_AFTER_S

    def is_new_fetch(self, seq: int) -> bool:
        """Whether this Fetch comes for the first time, and note it. Without a number each one is new."""
        is_new = seq == 0 or seq not in self._fetches
        remember(self._fetches, seq, MAX_REMEMBERED_FETCHES)
        return is_new

    def queue(self, shipments: Iterable[Shipment]) -> None:
        """Send these as the client acknowledges earlier ones. A repeated answer replaces what waits of it."""
        for shipment in shipments:
            if shipment.seq and shipment.part == 1:
                self._unqueue_answer(shipment.seq)
            if self._num_queued + len(shipment.sizes) > MAX_CLAIMS:
                self.abandoned += len(shipment.sizes)
            else:
                self._shipments.append(shipment)
                self._num_queued += len(shipment.sizes)

    def next_shipment(self, now_s: float) -> Shipment | None:
        """What may be sent now, its records claimed; None when there is nothing, or too much is unacknowledged."""
        if not self._shipments:
            return None
        shipment = self._shipments[0]
        if not self.allowance.admits(self._unacknowledged_bytes, shipment.num_bytes):
            return None
        self._shipments.popleft()
        self._num_queued -= len(shipment.sizes)
        for record_id, num_bytes in shipment.sizes.items():
            self._claim(record_id, _Claim(num_bytes, now_s + CLAIM_S))
        return shipment

    def acknowledge(self, record_ids: Iterable[str]) -> None:
        """The client has taken these records over."""
        for record_id in record_ids:
            self._was_repeated &= not self._release(record_id)

    def end(self) -> int:
        """Nothing is expected of the client any more. Returns how many deliveries were given up before."""
        self.acknowledge(list(self.claims))
        return self.abandoned

    def overdue(self, now_s: float) -> list[str]:
        """Records to deliver again, their claims renewed; those tried often enough are given up.

        Who does not acknowledge probably reads too slowly: little comes again until something is acknowledged.
        """
        due = list(takewhile(lambda item: item[1].due_s <= now_s, self.claims.items()))
        room_bytes = MAX_REPEATED_BYTES if self._was_repeated else MAX_UNACKNOWLEDGED_BYTES
        again: list[str] = []
        for record_id, claim in due:
            self._release(record_id)
            if claim.tries >= MAX_TRIES:
                self.abandoned += 1
                continue
            if is_sent := room_bytes > 0:
                again.append(record_id)
            room_bytes -= claim.num_bytes
            self._claim(record_id, _Claim(claim.num_bytes, now_s + CLAIM_S, claim.tries + is_sent))
        self._was_repeated |= bool(again)
        return again

    def _claim(self, record_id: str, claim: _Claim) -> None:
        """Expect an acknowledgement of this record until the claim is due."""
        self._release(record_id)
        self.claims[record_id] = claim
        self._unacknowledged_bytes += claim.num_bytes
        self.allowance.used_bytes += claim.num_bytes
        if len(self.claims) > MAX_CLAIMS:
            self._release(next(iter(self.claims)))
            self.abandoned += 1

    def _release(self, record_id: str) -> bool:
        """False when nothing was expected of it."""
        claim = self.claims.pop(record_id, None)
        if claim is not None:
            self._unacknowledged_bytes -= claim.num_bytes
            self.allowance.used_bytes -= claim.num_bytes
        return claim is not None

    def _unqueue_answer(self, seq: int) -> None:
        self._shipments = deque(shipment for shipment in self._shipments if shipment.seq != seq)
        self._num_queued = sum(len(shipment.sizes) for shipment in self._shipments)
