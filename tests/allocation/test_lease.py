"""The worker's side of a lease."""

import pytest

from mrl.allocation.lease import LeaseHolder, Used
from mrl.allocation.slot_core import SlotCore, SlotSettings
from mrl.records.codec import decode, encode
from mrl.records.leases import LeaseGrant, LeaseRequest, LeaseReturn, ReportAck, allocator_request_decoder


class Wire:
    """Collects what a holder posts and how often it asks for a new link."""

    def __init__(self) -> None:
        self.posted: list[LeaseRequest] = []
        self.reconnects = 0

    def post(self, body: bytes) -> bool:
        """Take a message."""
        self.posted.append(decode(body, allocator_request_decoder))
        return True

    def reconnect(self) -> None:
        """Count a request for a new link."""
        self.reconnects += 1


def connected() -> tuple[LeaseHolder, Wire]:
    """A holder on a fake wire that has asked for the first time, at 0 s."""
    holder, wire = LeaseHolder("worker/qwen/0", "qwen"), Wire()
    holder.open(wire.post, wire.reconnect)
    holder.on_tick(0.0, Used())
    return holder, wire


def grant(sequence: int, epoch: int, slots: int, holder: str = "worker/qwen/0") -> bytes:
    """An answer with a ttl of 10 s."""
    return encode(LeaseGrant(holder=holder, policy="qwen", slots=slots, epoch=epoch, ttl_s=10.0, sequence=sequence))


def test_nothing_may_run_before_the_first_grant() -> None:
    """The holder asks at its first tick, and again a quarter of a second later."""
    holder, wire = connected()
    assert holder.slots(0.0) == 0

    holder.on_tick(0.1, Used())
    holder.on_tick(0.3, Used())
    assert [request.sequence for request in wire.posted] == [1, 2]
    assert (wire.posted[0].holder, wire.posted[0].policy, wire.posted[0].epoch) == ("worker/qwen/0", "qwen", 0)


def test_what_is_given_back_is_not_asked_for_again() -> None:
    """A grant that is still on its way changes nothing."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.give_back(0.2)
    holder.on_tick(5.0, Used())
    assert wire.posted[-1] == LeaseReturn(holder="worker/qwen/0", policy="qwen")
    assert holder.slots(5.1) == 0


def test_a_grant_is_in_force_at_once_and_renewed_each_second() -> None:
    """The request tells the totals and the lease that the worker acts under."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    assert holder.slots(0.2) == 64

    holder.on_tick(0.9, Used(100, 12.5))
    holder.on_tick(1.1, Used(100, 12.5))
    assert len(wire.posted) == 2
    request = wire.posted[1]
    assert (request.generated_tokens, request.slot_seconds, request.epoch, request.slots) == (100, 12.5, 5, 64)


def test_a_larger_lease_is_reported_at_once() -> None:
    """An allocator that restarts now has to know of it, whether the worker has looked or not."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.on_tick(1.2, Used())
    assert (wire.posted[-1].epoch, wire.posted[-1].slots) == (5, 64)


def test_a_smaller_lease_is_acted_under_only_when_the_worker_looks() -> None:
    """A batch that runs keeps the old lease, and the allocator is told so."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.slots(0.2)
    holder.on_tick(1.2, Used())
    holder.on_message(grant(2, 6, 16), 1.3)
    holder.on_tick(2.3, Used())
    assert (wire.posted[-1].epoch, wire.posted[-1].slots) == (5, 64)

    assert holder.slots(2.4) == 16
    holder.on_tick(3.4, Used())
    assert (wire.posted[-1].epoch, wire.posted[-1].slots) == (6, 16)


def test_what_a_smaller_lease_has_no_room_for_is_given_back_as_it_ends() -> None:
    """Nothing may begin meanwhile; the allocator hears how much is in use, under the lease before."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.slots(0.2, 60)
    holder.on_tick(1.2, Used())
    holder.on_message(grant(2, 6, 16), 1.3)
    told = []
    for now_s, in_use in ((2.4, 60), (3.6, 24), (4.8, 16)):
        assert holder.slots(now_s - 0.1, in_use) == 16
        holder.on_tick(now_s, Used())
        told.append((wire.posted[-1].epoch, wire.posted[-1].slots))
    assert told == [(5, 60), (5, 24), (6, 16)]

    holder.on_message(grant(wire.posted[-1].sequence, 7, 32), 4.9)
    assert holder.slots(5.0, 16) == 32


def test_a_lease_that_grows_again_while_it_shrinks_holds_at_once() -> None:
    """What runs is less than it allows."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.slots(0.2, 60)
    holder.on_tick(1.2, Used())
    holder.on_message(grant(2, 6, 16), 1.3)
    holder.slots(2.3, 40)
    holder.on_tick(2.4, Used())
    holder.on_message(grant(3, 7, 48), 2.5)
    holder.on_tick(3.5, Used())
    assert (wire.posted[-1].epoch, wire.posted[-1].slots) == (7, 48)


def test_what_is_old_foreign_or_unreadable_is_ignored() -> None:
    """An older epoch, another holder, an answer to no open request, garbage: nothing changes."""
    holder, _ = connected()
    holder.on_tick(1.0, Used())
    holder.on_message(grant(1, 5, 64), 1.1)
    holder.on_message(grant(2, 4, 10), 1.2)
    holder.on_message(grant(2, 6, 10, holder="worker/qwen/1"), 1.2)
    holder.on_message(grant(1, 6, 10), 1.2)
    holder.on_message(b"garbage", 1.2)
    holder.on_message(encode(ReportAck(policy="qwen")), 1.2)

    assert holder.slots(1.3) == 64


def test_the_lease_stays_in_force_while_the_allocator_is_silent() -> None:
    """The holder keeps working, and asks for a new link every few seconds."""
    holder, wire = connected()
    holder.on_tick(1.0, Used())
    holder.on_message(grant(2, 5, 64), 1.5)
    for tenth in range(20, 300):
        holder.on_tick(tenth / 10, Used())

    assert holder.slots(30.0) == 64
    assert wire.reconnects == 9


def test_an_answered_holder_never_asks_for_a_new_link() -> None:
    """Silence counts from the first request that was not answered."""
    holder, wire = connected()
    for second in range(20):
        holder.on_message(grant(second + 1, 5, 64), second + 0.1)
        for tenth in range(2, 11):
            holder.on_tick(second + tenth / 10, Used())

    assert wire.reconnects == 0


def test_a_worker_that_was_stopped_for_longer_than_the_ttl_has_no_lease() -> None:
    """Others may have its slots: it runs nothing, takes no answer to an old request, and asks anew."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.on_tick(1.2, Used())
    assert holder.slots(1.3) == 64

    assert holder.slots(11.3) == 0
    holder.on_message(grant(2, 5, 64), 11.3)
    assert holder.slots(11.3) == 0
    holder.on_tick(11.4, Used())
    holder.on_message(grant(wire.posted[-1].sequence, 9, 32), 11.5)
    assert holder.slots(11.6) == 32
    assert holder.times_lost == 1


@pytest.mark.parametrize(("last_tick_s", "read_s"), [(10.0, 10.1), (0.0, 6.0)])
def test_a_grant_that_is_over_or_may_be_when_it_is_read_is_none(last_tick_s: float, read_s: float) -> None:
    """It was on its way for too long, or waited in the socket while this process was stopped before its first lease."""
    holder, wire = connected()
    for tick in range(1, round(last_tick_s) + 1):
        holder.on_tick(float(tick), Used())
    holder.on_message(grant(1, 5, 64), read_s)
    assert holder.slots(read_s) == 0
    holder.on_tick(read_s + 1.0, Used())
    holder.on_message(grant(wire.posted[-1].sequence, 5, 64), read_s + 1.1)
    assert holder.slots(read_s + 1.2) == 64


def test_a_worker_that_fell_asleep_without_a_lease_asks_for_one_when_it_wakes() -> None:
    """Nothing of what it lost runs any more."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    assert holder.is_lost(11.4)
    holder.rest()
    holder.wake(9, 12.0)
    holder.on_tick(12.1, Used())
    assert len(wire.posted) == 2


@pytest.mark.parametrize(("last_tick_s", "now_s", "lost"), [(3.9, 6.8, False), (3.9, 7.0, True), (14.5, 17.4, False)])
def test_a_lease_that_may_run_out_before_it_is_renewed_is_lost_after_a_stop(
    last_tick_s: float, now_s: float, lost: bool
) -> None:
    """A request may be lost that would renew it in time. A stop that nobody noticed costs nothing, however late the
    allocator is with its answers."""
    holder, _ = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    for tick in range(1, round(10 * last_tick_s) + 1):
        holder.on_tick(0.1 * tick, Used())
    assert holder.is_lost(now_s) == lost


def test_an_answer_to_what_was_asked_before_a_stop_or_a_sleep_is_none() -> None:
    """However long its time has yet to run: others may have been promised the slots meanwhile."""
    stopped, resting = connected(), connected()
    for holder, wire in (stopped, resting):
        holder.on_message(grant(1, 5, 64), 0.1)
        for tick in range(1, 40):
            holder.on_tick(0.1 * tick, Used())
        assert len(wire.posted) == 4
    assert stopped[0].is_lost(7.0)
    resting[0].rest()
    resting[0].wake(9, 7.0)
    for holder, _ in (stopped, resting):
        holder.on_message(grant(4, 5, 64), 7.0)
        assert holder.slots(7.0) == 0


def test_short_stops_are_one_long_one_until_a_renewal_is_answered() -> None:
    """Of two, after each of which a request was sent and lost, the allocator saw one; an answer ends the count."""
    answered, unanswered = connected(), connected()
    for holder, wire in (answered, unanswered):
        holder.on_message(grant(1, 5, 64), 0.1)
        holder.on_tick(2.1, Used())
        if holder is answered[0]:
            holder.on_message(grant(wire.posted[-1].sequence, 5, 64), 2.2)
        for tick in range(22, 51):
            holder.on_tick(0.1 * tick, Used())
        holder.on_tick(7.3, Used())
    assert (answered[0].times_lost, unanswered[0].times_lost) == (0, 1)


def test_what_runs_without_a_lease_has_to_end_before_another_is_asked_for() -> None:
    """The allocator would take the worker's word for it that the slots are still its own."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    assert not holder.is_lost(0.2)
    holder.on_tick(11.4, Used())
    holder.on_tick(12.4, Used())
    assert (holder.is_lost(12.4), len(wire.posted)) == (True, 1)
    assert (holder.slots(12.5, 40), holder.is_lost(12.5)) == (0, True)

    assert (holder.slots(12.6, 0), holder.is_lost(12.6)) == (0, False)
    holder.on_tick(12.7, Used())
    assert (wire.posted[-1].epoch, wire.posted[-1].slots) == (5, 0)


def test_a_restarted_allocator_hears_of_the_lease_that_a_worker_still_shrinks_to() -> None:
    """It has to grant under later epochs than that one."""
    holder, wire = connected()
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.on_tick(1.2, Used())
    holder.on_message(grant(2, 8, 16), 1.3)
    holder.slots(1.4, 60)
    holder.on_tick(2.3, Used())
    request = wire.posted[-1]
    assert (request.epoch, request.slots, request.newest_epoch) == (5, 60, 8)

    core = SlotCore(["qwen"], SlotSettings(64, 8, 10.0), 0.0, settling=True)
    [(_, reply)] = core.handle(request, 0.1)
    assert isinstance(reply, LeaseGrant)
    holder.on_message(encode(reply), 2.4)
    assert reply.epoch > 8
    holder.on_tick(3.4, Used())
    assert wire.posted[-1].newest_epoch == reply.epoch


def test_a_worker_on_a_unit_says_so_and_ends_when_it_was_stopped_for_too_long() -> None:
    """Where slots are leased a new lease is enough; a unit may be somebody else's by now."""
    wire, holders = Wire(), [LeaseHolder("worker/qwen/0", "qwen", unit="cpu:0", unit_epoch=7), connected()[0]]
    for holder in holders:
        holder.open(wire.post, wire.reconnect)
        holder.on_tick(1.0, Used())
        sequence = wire.posted[-1].sequence
        holder.on_message(grant(sequence, 7, 64), 1.1)
        assert holder.slots(1.2) == 64
        assert not holder.has_lost_unit
        holder.on_tick(30.0, Used())
        assert holder.slots(30.0) == 0
    assert [holder.has_lost_unit for holder in holders] == [True, False]
    assert (wire.posted[0].unit, wire.posted[0].unit_epoch) == ("cpu:0", 7)
    assert wire.posted[-1].unit == ""


def test_a_worker_that_sleeps_asks_for_nothing_and_wakes_under_a_new_epoch() -> None:
    """However long it slept its unit is its own again, and an answer to an old request is none to it."""
    wire = Wire()
    holder = LeaseHolder("worker/qwen/0", "qwen", unit="cpu:0", unit_epoch=5)
    holder.open(wire.post, wire.reconnect)
    holder.on_tick(0.0, Used())
    holder.on_message(grant(1, 5, 64), 0.1)
    holder.rest()
    asked = len(wire.posted)
    holder.on_tick(2.0, Used())
    assert (len(wire.posted), holder.slots(3.0)) == (asked, 0)

    holder.wake(9, 1000.0)
    holder.on_tick(1000.1, Used())
    assert (wire.posted[-1].unit_epoch, wire.posted[-1].slots) == (9, 0)
    holder.on_message(grant(1, 9, 64), 1000.2)
    assert holder.slots(1000.2) == 0
    holder.on_message(grant(wire.posted[-1].sequence, 9, 32), 1000.2)
    assert (holder.slots(1000.3), holder.has_lost_unit) == (32, False)


def test_a_worker_that_awaits_its_first_turn_says_so_and_is_silent_while_its_engine_starts() -> None:
    """Where slots are leased it is silent all the time."""
    for unit in ("cpu:0", ""):
        holder, wire = LeaseHolder("worker/qwen/0", "qwen", unit=unit, unit_epoch=7), Wire()
        holder.rest()
        holder.open(wire.post, wire.reconnect)
        holder.on_tick(0.0, Used())
        assert wire.posted == []
        holder.await_turn()
        holder.on_tick(0.5, Used())
        assert [(one.unit_epoch, one.awaits_turn) for one in wire.posted] == ([(7, True)] if unit else [])
        holder.on_message(grant(1, 7, 0), 0.6)
        holder.on_tick(30.0, Used())  # this process stood still for longer than its lease
        holder.await_turn()
        holder.on_tick(30.5, Used())
        told = len(wire.posted)
        assert told == (2 if unit else 0)
        holder.rest()
        holder.on_tick(500.0, Used())  # a load may keep all threads from running
        assert len(wire.posted) == told
        holder.wake(7, 501.0)
        holder.on_tick(501.0, Used())
        assert (wire.posted[-1].awaits_turn, holder.has_lost_unit) == (False, False)
