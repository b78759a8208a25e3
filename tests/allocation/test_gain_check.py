"""Predicted and measured gains of moves, by hand-made numbers: after two dwells half of the window is new."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from mrl.allocation.decision import DecisionRecord, Shares, Verdict
from mrl.allocation.gain_check import Gain, GainCheck
from mrl.allocation.objective import Reading, Rule

RULE = Rule(period_s=5.0, dwell_s=10.0, window_s=20.0 / math.log(2.0))
BEFORE: Shares = {"a": (3,), "b": (1,)}
AFTER: Shares = {"a": (2,), "b": (2,)}
PER_REPLICA = {"a": 0.6, "b": 0.4}
WEIGHT = {"a": 1.0, "b": 0.5}


def decision(
    now_s: float, b: float, *, a: float = 1.0, verdict: Verdict = "best already", rule: Rule = RULE,
    silent: str = "", unknown: str = "",
) -> DecisionRecord:  # fmt: skip
    """When it moves, a gives one of its three replicas to b; a and b: windowed progress."""
    replicas = BEFORE if verdict == "moved" else AFTER
    readings = tuple(
        Reading(policy=name, replicas=replicas[name], supply_progress=0.5, weight=WEIGHT[name], silent=name in silent,
                progress_per_replica=None if name in unknown else (PER_REPLICA[name],))
        for name in BEFORE
    )  # fmt: skip
    return DecisionRecord(
        now_s=now_s, rule=rule, urgent=False, capacity_units=(4,), readings=readings, progress={"a": a, "b": b},
        candidate=AFTER, shares=AFTER, gain=0.1, moved_units=1, bucket_units=None, verdict=verdict,
    )  # fmt: skip


def gains(records: Iterable[DecisionRecord]) -> list[Gain]:
    check = GainCheck()
    return [gain for record in records if (gain := check.see(record))]


def story(**more: Any) -> list[DecisionRecord]:
    """The progress of b is 0.4 when it moves, and 0.5 and 0.7 one and two dwells later."""
    move = decision(20.0, 0.4, verdict="moved", **more)
    return [decision(15.0, 0.3, **more), move, decision(30.0, 0.5, **more), decision(40.0, 0.7, **more),
            decision(45.0, 0.9, **more), decision(99.0, 1.0, **more)]  # fmt: skip


def test_a_move_is_measured_once_two_dwells_later() -> None:
    """b is fed 0.8 from the move on, so half of the way from 0.4; it came to 0.7."""
    assert gains(story()) == [pytest.approx(Gain(predicted=0.2, measured=0.3))]


def test_the_prediction_is_for_the_time_of_the_measurement() -> None:
    """Twice as long: three quarters of the way. A learner is fed in whole, and not more: a stays at 1."""
    [gain] = gains([*story()[:3], decision(60.0, 0.65)])
    assert gain == pytest.approx(Gain(predicted=0.3, measured=0.25))
    [gain] = gains([decision(20.0, 1.0, a=0.8, verdict="moved"), decision(40.0, 1.0, a=0.85)])
    assert gain == pytest.approx(Gain(predicted=0.1, measured=0.05)), "b, at 1, falls to 0.9, and a rises to no more"


def test_with_weights_it_is_progress_per_weight() -> None:
    """b, of half the priority, from 0.8 to 1 of a; a would have 1.0 then too."""
    [gain] = gains(story(rule=msgspec.structs.replace(RULE, objective="weighted")))
    assert gain == pytest.approx(Gain(predicted=0.2, measured=0.2))


@pytest.mark.parametrize("objective", ["throughput", "static"])
def test_other_objectives_do_not_raise_the_least(objective: str) -> None:
    assert gains(story(rule=msgspec.structs.replace(RULE, objective=objective))) == []


def test_a_silent_policy_does_not_count() -> None:
    """Its demand may be unknown; a alone had all that it needs before."""
    assert gains(story(silent="b", unknown="b")) == [pytest.approx(Gain(0.0, 0.0))]
    assert gains(story(silent="ab")) == []


def test_what_cannot_be_told_is_not_measured() -> None:
    """A demand is unknown, or who takes part has changed; a decision that was no move."""
    assert gains(story(unknown="b")) == []
    assert gains([*story()[:3], decision(40.0, 0.7, silent="a")]) == []
    assert gains([story()[0], *story()[2:]]) == []


def test_a_move_that_another_one_follows_soon_is_not_measured_and_the_other_one_is() -> None:
    records = [*story()[:2], decision(30.0, 0.6, verdict="moved"), *story()[3:]]
    assert gains(records) == [pytest.approx(Gain(predicted=0.8 + (0.6 - 0.8) * 0.5 ** (69 / 20) - 0.6, measured=0.4))]


def test_policies_that_do_not_compete_are_measured_apart() -> None:
    def renamed(record: DecisionRecord) -> DecisionRecord:
        readings = tuple(msgspec.structs.replace(one, policy=one.policy * 2) for one in record.readings)
        shares = {name * 2: share for name, share in record.shares.items()}
        progress = {name * 2: value for name, value in record.progress.items()}
        return msgspec.structs.replace(record, readings=readings, shares=shares, progress=progress)

    mixed = [record for one in story() for record in (one, renamed(one))]
    assert gains(mixed) == gains(story()) * 2
