"""What the allocator answers and decides."""

import pytest

from mrl.allocation.slot_core import SlotCore, SlotSettings
from mrl.errors import ConfigError
from mrl.records.codec import decode, encode
from mrl.records.leases import (
    LearnerReport,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    ReportAck,
    allocator_reply_decoder,
)

SETTINGS = SlotSettings(slots=100, floor_slots=10, ttl_s=10.0)


def core(now_s: float = 0.0, *, settling: bool = False) -> SlotCore:
    """An allocator of two policies."""
    return SlotCore(["qwen", "gemma"], SETTINGS, now_s, settling=settling)


def ask(
    allocator: SlotCore, holder: str, now_s: float, *, acting: tuple[int, int] = (0, 0), tokens: int = 0,
    slot_seconds: float = 0.0,
) -> LeaseGrant:  # fmt: skip
    """Renew the lease of "<policy>/<index>"; `acting` is the (epoch, slots) that it acts under."""
    request = LeaseRequest(
        holder=holder, policy=holder.split("/")[0], generated_tokens=tokens, slot_seconds=slot_seconds, epoch=acting[0],
        slots=acting[1], sequence=7,
    )  # fmt: skip
    ((name, reply),) = allocator.handle(request, now_s)
    assert name == holder
    assert isinstance(reply, LeaseGrant)
    return reply


def lease(grant: LeaseGrant) -> tuple[int, int]:
    """What a holder that took this grant acts under."""
    return grant.epoch, grant.slots


def report(allocator: SlotCore, policy: str, tokens: int, busy_s: float, now_s: float) -> None:
    """A learner's totals."""
    allocator.handle(LearnerReport(policy=policy, trained_tokens=tokens, busy_s=busy_s, data_wait_s=0.0), now_s)


def test_the_first_policy_leaves_room_for_one_that_is_still_starting() -> None:
    """Until the ttl has passed every policy of the run counts; then its slots go to those that are there."""
    allocator = core()

    assert ask(allocator, "qwen/0", 1.0).slots == 50
    assert ask(allocator, "qwen/0", 10.5).slots == 100


def test_a_lease_echoes_its_request_and_keeps_its_epoch_while_it_does_not_change() -> None:
    """Holder, policy, ttl and sequence come back; a renewal is no change."""
    allocator = core()
    first = ask(allocator, "qwen/0", 1.0)

    assert (first.holder, first.policy, first.ttl_s, first.sequence) == ("qwen/0", "qwen", 10.0, 7)
    assert lease(ask(allocator, "qwen/0", 2.0, acting=lease(first))) == lease(first)


def test_what_a_worker_gives_back_is_free_at_once() -> None:
    """The other policy does not wait for the ttl of one that ended."""
    allocator = core()
    ask(allocator, "qwen/0", 1.0)
    other = ask(allocator, "gemma/0", 1.0)
    assert other.slots == 50

    allocator.handle(LeaseReturn(holder="qwen/0", policy="qwen"), 11.0)
    assert ask(allocator, "gemma/0", 11.1, acting=lease(other)).slots == 100
    allocator.handle(LeaseReturn(holder="qwen/0", policy="qwen"), 11.2)
    assert ask(allocator, "gemma/0", 11.3).slots == 100


def test_a_policys_slots_are_divided_over_its_workers() -> None:
    """The parts differ by at most one and sum to the policy's share."""
    allocator = core()
    first = ask(allocator, "qwen/0", 1.0)
    second, third = ask(allocator, "qwen/1", 1.0), ask(allocator, "qwen/2", 1.0)

    shrunk = ask(allocator, "qwen/0", 2.0, acting=lease(first))
    ask(allocator, "qwen/0", 3.0, acting=lease(shrunk))
    parts = [shrunk.slots] + [
        ask(allocator, name, 3.0, acting=lease(old)).slots for name, old in (("qwen/1", second), ("qwen/2", third))
    ]
    assert sorted(parts) == [16, 17, 17]


def test_a_growing_lease_waits_until_the_shrinking_holder_acts_under_its_new_one() -> None:
    """Neither the decision nor the grant frees slots, only the holder's word."""
    allocator = core()
    alone = ask(allocator, "qwen/0", 11.0)
    assert alone.slots == 100

    assert ask(allocator, "gemma/0", 12.0).slots == 0
    shrunk = ask(allocator, "qwen/0", 12.5, acting=lease(alone))
    assert shrunk.slots == 50
    assert shrunk.epoch > alone.epoch
    assert ask(allocator, "gemma/0", 13.0).slots == 0
    ask(allocator, "qwen/0", 13.5, acting=lease(shrunk))
    assert ask(allocator, "gemma/0", 14.0).slots == 50


def test_a_silent_holder_counts_until_its_ttl_has_passed() -> None:
    """Then its slots serve others, and when it is back it gets its share again."""
    allocator = core()
    qwen = ask(allocator, "qwen/0", 1.0)
    gemma = ask(allocator, "gemma/0", 1.0)
    for now_s in range(2, 11):
        gemma = ask(allocator, "gemma/0", float(now_s), acting=lease(gemma))
        allocator.tick(float(now_s))
    assert gemma.slots == 50

    allocator.tick(11.5)
    gemma = ask(allocator, "gemma/0", 11.5, acting=lease(gemma))
    assert gemma.slots == 100

    # It still acts under its old lease, so gemma's shrinking alone makes room.
    back = ask(allocator, "qwen/0", 12.0, acting=lease(qwen))
    assert back.slots == 50
    shrunk = ask(allocator, "gemma/0", 12.5, acting=lease(gemma))
    assert shrunk.slots == 50


def test_slots_follow_measured_throughput() -> None:
    """Equal learners, engines that differ by three: in the long run the slower engine has three times the slots."""
    allocator = core()
    acting = {name: lease(ask(allocator, name, 1.0)) for name in ("qwen/0", "gemma/0")}
    rates, slot_seconds = {"qwen/0": 30.0, "gemma/0": 10.0}, dict.fromkeys(acting, 0.0)
    held = []
    for second in range(2, 400):
        for name, rate in rates.items():
            slot_seconds[name] += acting[name][1]
            tokens = int(rate * slot_seconds[name])
            report(allocator, name.split("/")[0], 1200 * second, 0.9 * second, float(second))
            grant = ask(
                allocator, name, float(second), acting=acting[name], tokens=tokens, slot_seconds=slot_seconds[name]
            )
            acting[name] = lease(grant)
        decisions = {decision.policy: decision for decision in allocator.tick(float(second))}
        held.append(decisions["gemma"].held_slots / sum(d.held_slots for d in decisions.values()))

    assert sum(held[100:]) / len(held[100:]) == pytest.approx(0.75, abs=0.03)
    assert decisions["qwen"].demand_slots == pytest.approx(1200 / 0.9 / 30, rel=0.05)
    assert decisions["qwen"].progress == pytest.approx(1.0)


def test_a_small_gain_moves_nothing() -> None:
    """A demand that drifts by one percent is noise."""
    allocator = core()
    acting = {name: lease(ask(allocator, name, 1.0)) for name in ("qwen/0", "gemma/0")}
    for second in range(2, 30):
        for name, rate in (("qwen/0", 10.1), ("gemma/0", 10.0)):
            slot_seconds = 50.0 * second
            report(allocator, name.split("/")[0], 3000 * second, 1.0 * second, float(second))
            ask(
                allocator,
                name,
                float(second),
                acting=acting[name],
                tokens=int(rate * slot_seconds),
                slot_seconds=slot_seconds,
            )
        decisions = allocator.tick(float(second))

    assert [decision.slots for decision in decisions] == [50, 50]
    assert [decision.moved_slots for decision in decisions] == [0, 0]


def test_a_restarted_allocator_confirms_leases_for_one_ttl_and_grants_none() -> None:
    """It does not know who else holds slots; its epoch lies above any that it heard of."""
    allocator = core(settling=True)

    confirmed = ask(allocator, "qwen/0", 1.0, acting=(41, 70))
    assert lease(confirmed) == (41, 70)
    assert ask(allocator, "gemma/0", 2.0).slots == 0
    assert ask(allocator, "gemma/0", 3.0, acting=(52, 30)).slots == 30

    shrunk = ask(allocator, "qwen/0", 10.5, acting=(41, 70))
    assert shrunk.slots == 50
    assert shrunk.epoch > 52


def test_a_worker_that_claims_the_last_epoch_or_all_slots_of_the_world_shuts_nobody_out() -> None:
    """Later leases can still be written down, and it cannot hold more than there is."""
    allocator = core()
    last = 2**53 - 1
    assert last > ask(allocator, "qwen/0", 1.0, acting=(last, 10**6)).epoch > 41
    ask(allocator, "qwen/0", 2.0, acting=(last, 10**6))
    heard = LeaseRequest(
        holder="qwen/0", policy="qwen", generated_tokens=0, slot_seconds=0.0, epoch=0, newest_epoch=last
    )
    allocator.handle(heard, 2.0)
    ask(allocator, "qwen/0", 2.0, acting=(last, 10**6))
    gemma = ask(allocator, "gemma/0", 2.0)

    assert decode(encode(gemma), allocator_reply_decoder) == gemma
    assert {one.policy: one.held_slots for one in allocator.tick(2.1)} == {"qwen": 100, "gemma": 0}


def test_an_allocator_that_was_stopped_itself_expires_nobody() -> None:
    """Requests that wait in its socket after a long stop are those of holders that are alive."""
    allocator = core()
    qwen, gemma = ask(allocator, "qwen/0", 1.0), ask(allocator, "gemma/0", 1.0)

    assert ask(allocator, "qwen/0", 60.0, acting=lease(qwen)).slots == 50
    allocator.tick(60.1)
    assert ask(allocator, "qwen/0", 60.2, acting=lease(qwen)).slots == 50
    assert lease(ask(allocator, "gemma/0", 60.3, acting=lease(gemma))) == lease(gemma)


def test_a_report_is_acknowledged_and_an_unknown_policy_is_not() -> None:
    """A name that the run does not have gets no slots and no answer."""
    allocator = core()
    message = LearnerReport(policy="qwen", trained_tokens=1, busy_s=1.0, data_wait_s=0.0)
    stranger = LeaseRequest(holder="x", policy="llama", generated_tokens=0, slot_seconds=0.0, epoch=0)

    assert allocator.handle(message, 1.0) == [("qwen", ReportAck(policy="qwen"))]
    assert allocator.handle(stranger, 1.0) == []


def test_fewer_slots_than_policies_are_refused() -> None:
    """Each policy needs one slot at least; the message says what to change."""
    with pytest.raises(ConfigError, match=r"allocation\.slots.*raise allocation\.slots"):
        SlotCore(["a", "b"], SlotSettings(slots=1, floor_slots=1, ttl_s=1.0), 0.0)


def test_a_policy_whose_engine_stood_still_keeps_its_floor_and_takes_what_is_free() -> None:
    """After minutes in which no token came its demand is beyond all measure; alone, it gets every slot."""
    allocator = core()
    granted = ask(allocator, "qwen/0", 1.0)
    for number in range(1, 4):
        report(allocator, "qwen", 40_000 * number, 40.0 * number, float(number))
        granted = ask(
            allocator, "qwen/0", number + 0.5, acting=lease(granted), tokens=40 * number, slot_seconds=4.0 * number
        )
    seconds = 12.0
    for _ in range(40):
        seconds += 1e4
        granted = ask(allocator, "qwen/0", 5.0, acting=lease(granted), tokens=120, slot_seconds=seconds)

    [share] = [share for share in allocator.tick(6.0) if share.policy == "qwen"]
    assert share.demand_slots > 1e9
    assert share.slots >= SETTINGS.floor_slots
    report(allocator, "qwen", 120_000, 120.0, 12.0)
    ask(allocator, "qwen/0", 12.0, acting=lease(granted), tokens=120, slot_seconds=seconds)
    assert next(share for share in allocator.tick(12.5) if share.policy == "qwen").slots == 100


def test_work_is_that_of_the_slots_that_it_was_done_on() -> None:
    """It is told when it is done, perhaps after a lease has shrunk; the memory of a rate is in seconds of an engine."""

    def rate(*, shrinks_first: bool) -> float:
        allocator = core()
        report(allocator, "qwen", 40_000, 40.0, 11.0)
        alone = ask(allocator, "qwen/0", 11.0)
        work = {"tokens": 4_000, "slot_seconds": 4_000.0}
        ask(allocator, "qwen/0", 11.5)
        granted = ask(allocator, "qwen/0", 12.0, acting=lease(alone), **work)
        if shrinks_first:
            ask(allocator, "gemma/0", 12.1)
            granted = ask(allocator, "qwen/0", 12.2, acting=lease(granted), **work)
            assert (alone.slots, granted.slots) == (100, 50)
            ask(allocator, "qwen/0", 12.3, acting=lease(granted), **work)
        ask(allocator, "qwen/0", 12.5, acting=lease(granted), tokens=4_000, slot_seconds=9_000.0)
        return next(share for share in allocator.tick(13.0) if share.policy == "qwen").demand_slots

    assert rate(shrinks_first=True) == pytest.approx(rate(shrinks_first=False))
