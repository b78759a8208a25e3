"""How many answers a worker's lease allows, and what learner and allocator are told before the engine may start."""

import math
import time

import structlog

from mrl.allocation.lease import LeaseHolder
from mrl.rollout.link import STARTING, WorkerLink, WorkerProgress

log = structlog.get_logger()


class WholeBatch:
    """Allows the answers of a whole batch. It calls `LeaseHolder.slots` all the same: a lost lease is renewed only
    after that.
    """

    def __init__(self, lease: LeaseHolder, num_answers: int) -> None:
        self._lease, self._num_answers = lease, num_answers

    def __call__(self, in_flight: int) -> int:
        """Return how many answers may be in flight."""
        self._lease.slots(time.monotonic())
        return self._num_answers


class LeasedAnswers:
    """Allows as many answers as the lease. A change is logged, with the number that may be in flight at most."""

    def __init__(self, lease: LeaseHolder, group_size: int) -> None:
        self._lease, self._group_size = lease, group_size
        self._told = 0

    def __call__(self, in_flight: int) -> int:
        """Return how many answers the lease allows. Slots are in use by whole groups, as they are leased."""
        in_use = math.ceil(in_flight / self._group_size) * self._group_size
        leased = self._lease.slots(time.monotonic(), in_use)
        at_most = max(leased, in_use)
        if at_most != self._told:
            log.info("slots changed", leased=leased, at_most=at_most)
            self._told = at_most
        return leased


class FirstTurn:
    """Tells learner and allocator that an engine waits for its first turn on a device, and then that it starts.

    Both bound how long a start may take, and not how long other processes have the device before it.
    """

    def __init__(self, link: WorkerLink | None, lease: LeaseHolder) -> None:
        self._link, self._lease = link, lease

    def is_awaited(self, turns_seen: int) -> None:
        """Tell that the engine waits; `turns_seen` counts signs of progress of the processes ahead of it."""
        self._lease.await_turn()
        if self._link is not None:
            self._link.tell(lambda: WorkerProgress(turns_seen, is_loading=False))

    def has_come(self) -> None:
        """Tell that the engine starts."""
        self._lease.rest()
        if self._link is not None:
            self._link.tell(lambda: STARTING)
