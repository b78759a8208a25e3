"""A worker's side of its lease: how much it may run now, and the requests that keep the lease alive."""

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

from mrl.records.codec import encode
from mrl.records.leases import LeaseGrant, LeaseRequest, LeaseReturn, allocator_reply_decoder
from mrl.transport.requests import RequestLink, Requests

RENEW_S = 1.0
"""Seconds between two renewals of a lease with slots."""
RENEW_IDLE_S = 0.25
"""Seconds between two renewals of a lease without slots."""
LEAST_LEFT = 0.5
"""Part of the ttl that has to be left after the process stood still: a request may be lost, and the next takes time."""


class Used(NamedTuple):
    """Totals of a worker since it started; see `LeaseRequest`."""

    tokens: int = 0
    slot_seconds: float = 0.0
    active_s: float = 0.0
    sampled_tokens: int = 0
    full_answers: int = 0


class LeaseHolder:
    """A worker's lease.

    Shared between the worker's thread (`slots`) and the thread of its link (`on_message`, `on_tick`).

    While the allocator is silent the last lease stays in force: only the allocator acts on expiry. A worker loses its
    lease when its own process stood still, stopped or starved, for so long that the allocator may have thought it gone:
    others may have its slots. Running requests then have to end or to rest, and only after that does the worker ask for
    a new lease. An allocator that answers late costs no lease, however late: requests wait in its queue.
    """

    def __init__(self, holder: str, policy: str, *, unit: str = "", unit_epoch: int = 0) -> None:
        """`unit` and `unit_epoch` are those that the worker was started under, where whole units are leased."""
        self._holder, self._policy = holder, policy
        self._unit, self._unit_epoch = unit, unit_epoch
        self._lock = threading.RLock()
        self._requests = RequestLink("allocator", Requests())
        """A renewal is a report; the number of the report is the renewal's `sequence`."""
        self._lease = self._acting = (0, 0)
        """(epoch, slots) of the newest lease, and of the lease that the worker acts under."""
        self._valid_until_s = math.inf
        self._ttl_s = math.inf
        self._is_returned = self._is_resting = self._is_lost = self._awaits_turn = False
        self._asked_s = self._ticked_s = -math.inf
        self._stood_s, self._stood_until_s = 0.0, -math.inf
        """Seconds that the process stood still since the renewal that was answered last, and when the last such time
        ended."""
        self.times_lost = 0
        """How often the lease was lost because this process stood still."""

    @property
    def has_lost_unit(self) -> bool:
        """Whether the worker was started on a unit that may be another worker's since, so that it has to end."""
        return bool(self._unit) and self.times_lost > 0

    def is_lost(self, now_s: float) -> bool:
        """Whether running requests lost their lease: from when that is found until `slots` hears that they ended."""
        with self._lock:
            self._check_stopped(now_s)
            return self._is_lost

    def open(self, post: Callable[[bytes], object], reconnect: Callable[[], object]) -> None:
        """Connect the holder: `post` sends a message, `reconnect` looks the allocator's address up again."""
        self._requests.open(post, reconnect)

    def slots(self, now_s: float, in_use: int = 0) -> int:
        """Return how many requests may run at once from now until the next call, those `in_use` included.

        Requests for which a smaller lease has no room run to their end. The allocator is told of them until then, and
        lends only the rest.
        """
        with self._lock:
            self._check_stopped(now_s)
            self._is_lost = self._is_lost and in_use > 0
            epoch, slots = self._acting
            self._acting = self._lease if in_use <= self._lease[1] else (epoch, min(slots, in_use))
            return self._lease[1]

    def await_turn(self) -> None:
        """Note that the worker lives, and that its engine waits for its first turn on the device, maybe for long.

        The allocator of units waits for the engine. Where slots are leased, none are asked for.
        """
        with self._lock:
            self._awaits_turn, self._is_resting, self._is_lost = bool(self._unit), not self._unit, False

    def rest(self) -> None:
        """Note that the worker sleeps, or its engine starts: it runs nothing, its lease is over, it asks for none."""
        with self._lock:
            self._is_resting, self._is_lost, self._awaits_turn = True, False, False
            self._lease = self._acting = (0, 0)
            self._valid_until_s = self._ttl_s = math.inf
            self._requests.core.forget(self._requests.core.newest_report)

    def wake(self, unit_epoch: int, now_s: float) -> None:
        """Note that the worker's engine is there, woken under a new epoch or started."""
        with self._lock:
            self._is_resting, self._unit_epoch, self.times_lost = False, unit_epoch, 0
            self._ticked_s = now_s
            self._asked_s = -math.inf

    def give_back(self, now_s: float) -> None:
        """Give the lease back for good: the worker runs nothing any more.

        Its slots are free at once, not after the ttl.
        """
        with self._lock:
            self._is_returned = True
            self._lease = self._acting = (self._lease[0], 0)
            self._requests.report(encode(LeaseReturn(holder=self._holder, policy=self._policy)), now_s)

    def on_message(self, body: bytes, now_s: float) -> None:
        """Take an answer of the allocator; ignore one that is older than the present lease, or for another holder."""
        reply = self._requests.read(body, allocator_reply_decoder)
        if reply is None:
            return
        with self._lock:
            self._check_stopped(now_s)
            self._requests.answered(None, now_s)
            if isinstance(reply, LeaseGrant) and reply.holder == self._holder:
                self._take(reply, now_s)

    def on_tick(self, now_s: float, used: Used) -> None:
        """Renew the lease when that is due; after long silence look for the allocator again."""
        with self._lock:
            self._check_stopped(now_s)
            self._tick(now_s)
            waited_s = now_s - self._asked_s
            due = waited_s >= (RENEW_S if self._lease[1] else RENEW_IDLE_S)
            self._requests.on_tick(now_s)
            if due and not (self._is_returned or self._is_resting or self._is_lost):
                self._asked_s = now_s
                self._requests.report(encode(self._renewal(used)), now_s)

    def _tick(self, now_s: float) -> None:
        stood_s, self._ticked_s = now_s - self._ticked_s, now_s
        if RENEW_S < stood_s < math.inf:
            self._stood_s, self._stood_until_s = self._stood_s + stood_s, now_s

    def _renewal(self, used: Used) -> LeaseRequest:
        return LeaseRequest(
            holder=self._holder,
            policy=self._policy,
            generated_tokens=used.tokens,
            slot_seconds=used.slot_seconds,
            active_s=used.active_s,
            sampled_tokens=used.sampled_tokens,
            full_answers=used.full_answers,
            epoch=self._acting[0],
            slots=self._acting[1],
            newest_epoch=self._lease[0],
            sequence=self._requests.core.next_number,
            unit=self._unit,
            unit_epoch=self._unit_epoch,
            awaits_turn=self._awaits_turn,
        )

    def _take(self, grant: LeaseGrant, now_s: float) -> None:
        """Take a grant, unless it is outdated. Its time begins when it was asked for, not when it was made or read."""
        asked_s = self._requests.core.asked_s(grant.sequence) if grant.epoch >= self._lease[0] else None
        if asked_s is None:
            return
        self._requests.answered(grant.sequence, now_s)
        if asked_s >= self._stood_until_s:
            self._stood_s = 0.0
        if asked_s + grant.ttl_s < now_s:  # it was on its way for longer than its ttl
            return
        self._lease = (grant.epoch, grant.slots)
        if grant.slots >= self._acting[1]:
            # Running requests are within a larger lease at once; a smaller one waits until the worker calls `slots`.
            self._acting = self._lease
        self._ttl_s, self._valid_until_s = grant.ttl_s, asked_s + grant.ttl_s

    def _check_stopped(self, now_s: float) -> None:
        if self._ran_out(now_s):
            # The epoch stays: answers to earlier requests must not bring an older lease back.
            self._lease = (self._lease[0], 0)
            self._ttl_s = self._valid_until_s = math.inf
            self._requests.core.forget(self._requests.core.newest_report)
            self._stood_s = 0.0
            self._is_lost = True
            self.times_lost += 1

    def _ran_out(self, now_s: float) -> bool:
        """Whether this process stood still for so long that the lease is over, or may be before it can be renewed.

        Of a unit the allocator itself says whether it is still the worker's own; there a lease counts as over only when
        it surely is.
        """
        stood_s = now_s - self._ticked_s
        if self._unit:
            return stood_s > self._ttl_s
        is_short = self._valid_until_s - now_s < LEAST_LEFT * self._ttl_s
        # With one request lost before it, such a time is still too short for the allocator to notice.
        unnoticed_s = max(RENEW_S, LEAST_LEFT * self._ttl_s - 2 * RENEW_S)
        return is_short and stood_s > RENEW_S and self._stood_s + stood_s > unnoticed_s
