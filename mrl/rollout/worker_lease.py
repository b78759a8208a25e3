"""A worker and its lease: how many answers that allows, and what is said before the engine may start."""

import math
import time

import structlog

from mrl.allocation.lease import LeaseHolder
from mrl.rollout.link import STARTING, WorkerLink, WorkerProgress

log = structlog.get_logger()


class WholeBatch:
    """As many answers as a batch has. The lease is looked at all the same: one that was lost is not renewed before."""

    def __init__(self, lease: LeaseHolder, num_answers: int) -> None:
        self._lease, self._num_answers = lease, num_answers

    def __call__(self, in_flight: int) -> int:
        """Told how many are in flight."""
        self._lease.slots(time.monotonic())
        return self._num_answers


class LeasedAnswers:
    """How many answers the lease allows; the log tells when that changes, and how many may be in flight at most."""

    def __init__(self, lease: LeaseHolder, group_size: int) -> None:
        self._lease, self._group_size = lease, group_size
        self._told = 0

    def __call__(self, in_flight: int) -> int:
        """Told how many are in flight. They are given back by whole groups, as they are leased."""
        in_use = math.ceil(in_flight / self._group_size) * self._group_size
        leased = self._lease.slots(time.monotonic(), in_use)
        at_most = max(leased, in_use)
        if at_most != self._told:
            log.info("slots", leased=leased, at_most=at_most)
            self._told = at_most
        return leased


class FirstTurn:
    """What learner and allocator hear while an engine awaits its first turn on a device: it has not begun to start.

    Both bound how long a start may take, and neither how long others have the device before it.
    """

    def __init__(self, link: WorkerLink | None, lease: LeaseHolder) -> None:
        self._link, self._lease = link, lease

    def is_awaited(self, turns_seen: int) -> None:
        """Those ahead have got on so often."""
        self._lease.await_turn()
        if self._link is not None:
            self._link.tell(lambda: WorkerProgress(turns_seen, is_loading=False))

    def has_come(self) -> None:
        """The engine starts."""
        self._lease.rest()
        if self._link is not None:
            self._link.tell(lambda: STARTING)
