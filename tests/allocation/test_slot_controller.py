"""Shares of slots from what workers and learners report."""

import pytest

from mrl.allocation.objective import SLOTS
from mrl.allocation.slot_controller import SlotController
from mrl.records.leases import LearnerReport


def shares(*, slots: int = 64, group: int = 8, silent_s: float = 30.0, **weights: float) -> SlotController:
    """Two policies with groups of eight."""
    return SlotController(
        ["qwen", "gemma"], SLOTS, slots=slots, floor_slots=8, silent_s=silent_s,
        group_sizes={"qwen": group, "gemma": group}, weights=weights, now_s=0.0,
    )  # fmt: skip


def say(controller: SlotController, policy: str, now_s: float, tokens: int = 0, busy_s: float = 0.0) -> None:
    """A learner's totals."""
    report = LearnerReport(policy=policy, trained_tokens=tokens, busy_s=busy_s, data_wait_s=0.0)
    controller.add_learner(report, now_s)


HERE = {"qwen": 1, "gemma": 1}


def test_shares_are_whole_groups_and_equal_before_anything_is_measured() -> None:
    """Of 70 slots six are left over: no group of eight fits into them."""
    controller = shares(slots=70)
    controller.decide(0.0, HERE)
    assert controller.targets == {"qwen": 32, "gemma": 32}


def test_floors_that_do_not_fit_are_lowered_to_an_equal_part() -> None:
    """Sixteen slots hold one group of each policy, not two."""
    controller = SlotController(
        ["qwen", "gemma"], SLOTS, slots=16, floor_slots=16, silent_s=30.0, group_sizes={"qwen": 8, "gemma": 8},
        weights={}, now_s=0.0,
    )  # fmt: skip
    controller.decide(0.0, HERE)
    assert controller.targets == {"qwen": 8, "gemma": 8}


def test_a_decision_is_due_each_period_and_whenever_a_policy_comes_or_goes() -> None:
    """A worker that is gone and a learner that falls silent are noticed at once, and so is their return."""
    controller = shares()
    controller.decide(0.0, HERE)
    assert not controller.is_due(1.0, HERE)
    assert controller.is_due(2.0, HERE)
    assert controller.is_due(1.0, {"qwen": 1, "gemma": 0})

    say(controller, "qwen", 1.0)
    for now_s in range(2, 31, 2):
        controller.decide(float(now_s), HERE)
    assert controller.targets == {"qwen": 32, "gemma": 32}
    assert controller.is_due(31.5, HERE)
    controller.decide(31.5, HERE)
    assert controller.targets == {"qwen": 0, "gemma": 64}
    say(controller, "qwen", 32.0)
    assert controller.is_due(32.0, HERE)
    controller.decide(32.0, HERE)
    assert controller.targets["qwen"] == 32


def test_signs_of_life_are_no_reports() -> None:
    """Totals that were said before count once, and a sign of life keeps the share."""
    controller = shares()
    controller.decide(0.0, HERE)
    for now_s in range(100):
        say(controller, "qwen", float(now_s), tokens=10, busy_s=1.0)
    assert controller.num_reports["qwen"] == 1
    assert not controller.meters["qwen"].is_silent(120.0)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_rate_of_a_learner_is_that_of_late_also_to_an_allocator_that_was_restarted(is_restarted) -> None:
    """It trained faster for five hours, before its answers grew; reports may come late."""
    controller = shares()
    if not is_restarted:
        say(controller, "qwen", 0.0)
        for hour in range(1, 6):
            say(controller, "qwen", 3600.0 * hour, tokens=1_440_000 * hour, busy_s=3600.0 * hour)
    for minute in range(0, 64):
        busy_s = 18_000.0 + 60.0 * minute
        say(controller, "qwen", busy_s, tokens=7_200_000 + 6000 * minute, busy_s=busy_s)
        rate = controller.meters["qwen"].learner.value(0.0)
        assert rate is not None
        assert minute < 4 or rate == pytest.approx(100.0, rel=0.1)


def test_slots_follow_the_deficit_of_the_slower_engine() -> None:
    """Equal learners, one engine half as fast: it holds two thirds of the slots in the long run."""
    controller, busy_s, held = shares(), 0.0, {"qwen": 0.0, "gemma": 0.0}
    for second in range(600):
        busy_s += 0.9
        for policy, rate in (("qwen", 20.0), ("gemma", 10.0)):
            slots = controller.targets[policy]
            controller.add_worker(policy, rate * slots, float(slots), slots)
            say(controller, policy, float(second), tokens=int(1000 * busy_s), busy_s=busy_s)
            held[policy] += slots if second > 100 else 0.0
        if controller.is_due(float(second), HERE):
            controller.decide(float(second), HERE)
    assert held["gemma"] / sum(held.values()) == pytest.approx(2 / 3, abs=0.03)
    assert controller.demand_slots("qwen") == pytest.approx(50.0, rel=0.05)
