"""What a worker's lease lets run, and what the log says of it."""

import pytest
from structlog.testing import capture_logs

from mrl.allocation.lease import LeaseHolder, Used
from mrl.records.codec import decode
from mrl.records.leases import allocator_request_decoder
from mrl.rollout.link import STARTING, WorkerLink, WorkerProgress
from mrl.rollout.worker_lease import FirstTurn, LeasedAnswers, WholeBatch


class Asked(LeaseHolder):
    """A lease of so many slots, which notes what it is asked."""

    def __init__(self, slots: int) -> None:
        super().__init__("worker/a/0", "a")
        self.allowed, self.in_use = slots, list[int]()

    def slots(self, now_s: float, in_use: int = 0) -> int:
        self.in_use.append(in_use)
        return self.allowed


@pytest.mark.parametrize(("in_flight", "in_use"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_slots_are_given_back_by_whole_groups(in_flight: int, in_use: int) -> None:
    """As they are leased."""
    lease = Asked(64)
    assert LeasedAnswers(lease, 8)(in_flight) == 64
    assert lease.in_use == [in_use]


def test_the_log_tells_what_may_be_in_use_whenever_that_changes() -> None:
    """More than is leased, while what was begun before runs to its end."""
    lease = Asked(64)
    answers = LeasedAnswers(lease, 8)
    with capture_logs() as said:
        answers(0)
        answers(60)
        lease.allowed = 16
        for in_flight in (60, 57, 40, 16, 3):
            answers(in_flight)
    assert [(line["leased"], line["at_most"]) for line in said] == [(64, 64), (16, 40), (16, 16)]
    assert {line["event"] for line in said} == {"slots changed"}


def test_a_synchronous_worker_runs_its_batch_whatever_the_lease() -> None:
    """The lease is looked at all the same: one that nobody looks at is not asked for again after a stop."""
    lease = Asked(0)
    assert WholeBatch(lease, 64)(30) == 64
    assert lease.in_use == [0]


def test_learner_and_allocator_hear_that_a_first_turn_is_awaited_and_that_it_has_come() -> None:
    """Those ahead get on; the engine's start counts from there."""
    link, lease, told = WorkerLink("worker/a/0"), LeaseHolder("worker/a/0", "a", unit="cpu:0"), list[bool]()
    lease.open(lambda body: told.append(decode(body, allocator_request_decoder).awaits_turn), lambda: None)
    lease.rest()
    first = FirstTurn(link, lease)
    for now_s, num_moves in ((0.0, 3), (1.0, 4)):
        first.is_awaited(num_moves)
        lease.on_tick(now_s, Used())
        assert link._progress() == WorkerProgress(num_moves, is_loading=False)
    assert told == [True, True]
    first.has_come()
    lease.on_tick(2.0, Used())
    assert (link._progress(), told) == (STARTING, [True, True])
    FirstTurn(None, lease).is_awaited(1)  # a frozen policy has no learner
