"""Which pair of policy and type is tried next, and who makes room for it."""

import random
from typing import Any

import pytest

from mrl.allocation.decision import ControllerState, decide
from mrl.allocation.type_trial import trial_shares
from mrl.allocation.worth import Reading, Rule


def reading(policy: str, replicas: tuple[int, int], speeds: tuple[float, float], **more: Any) -> Reading:
    return Reading(policy=policy, replicas=replicas, progress_per_replica=speeds, supply_progress=0.5, **more)


UNTRIED = {"untried": (False, True)}


def test_two_policies_swap_and_nobody_has_fewer_replicas() -> None:
    """Of the two that could give, c loses nothing by it."""
    readings = [
        reading("a", (3, 0), (0.2, 0.2), **UNTRIED),
        reading("b", (0, 2), (0.1, 0.4)),
        reading("c", (1, 1), (0.4, 0.4)),
    ]
    assert trial_shares(readings, (4, 3)) == {"a": (2, 1), "b": (0, 2), "c": (2, 0)}


def test_a_free_unit_is_taken_first() -> None:
    readings = [reading("a", (3, 0), (0.2, 0.2), **UNTRIED), reading("b", (0, 2), (0.1, 0.4))]
    assert trial_shares(readings, (4, 3)) == {"a": (2, 1), "b": (0, 2)}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"replicas": (3, 0)}, {}),
        ({"replicas": (2, 1), **UNTRIED}, {}),
        ({"replicas": (3, 0), "silent": True, **UNTRIED}, {}),
        ({"replicas": (0, 0), **UNTRIED}, {}),
        ({"replicas": (3, 0), **UNTRIED}, {"silent": True}),
        ({"replicas": (3, 0), **UNTRIED}, {"units_per_replica": 2}),
        ({"replicas": (3, 0), **UNTRIED}, {"speeds": (0.0, 0.4)}),
    ],
    ids=[
        "tried",
        "on trial",
        "silent",
        "without a unit",
        "nobody to swap with",
        "gangs of other sizes",
        "unfit for what it would get",
    ],
)
def test_there_is_nothing_to_try(a: dict[str, Any], b: dict[str, Any]) -> None:
    giver = {"policy": "b", "replicas": (0, 1), "speeds": (0.1, 0.4)}
    readings = [reading("a", speeds=(0.2, 0.2), **a), reading(**(giver | b))]
    taken = sum(one.replicas[1] * one.units_per_replica for one in readings)
    assert trial_shares(readings, (3, taken)) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_trial_fits_and_changes_one_pair(seed: int) -> None:
    """In random pools: capacity kept, totals kept, and one policy begins on a type on which it was never seen."""
    rng = random.Random(seed)
    readings = [
        reading(
            f"p{index}", (rng.randint(0, 3), rng.randint(0, 3)), (rng.uniform(0.1, 1.0), rng.uniform(0.1, 1.0)),
            untried=(rng.random() < 0.5, rng.random() < 0.5),
        )
        for index in range(5)
    ]  # fmt: skip
    capacity = tuple(sum(one.replicas[kind] for one in readings) for kind in (0, 1))
    found = trial_shares(readings, capacity)
    may = [(one.policy, kind) for one in readings for kind in (0, 1)
           if one.untried[kind] and not one.replicas[kind] and any(one.replicas)]  # fmt: skip
    assert (found is None) <= (not may or 0 in capacity)
    if found is not None:
        assert tuple(map(sum, zip(*found.values(), strict=True))) == capacity
        assert all(sum(found[one.policy]) == sum(one.replicas) for one in readings)
        begun = [(one.policy, kind) for one in readings for kind in (0, 1)
                 if found[one.policy][kind] and not one.replicas[kind]]  # fmt: skip
        assert set(begun) & set(may)


def test_trials_keep_the_dwell_and_do_not_come_before_better_splits_twice() -> None:
    """A trial, then two better splits or nothing better to do; never two moves within a dwell."""
    rule = Rule(dwell_s=100.0)
    readings = [reading("a", (3, 0), (0.25, 0.25), **UNTRIED), reading("b", (0, 3), (0.25, 0.25))]
    fresh = ControllerState(decided_s=0.0, moved_s=0.0)

    assert decide(rule, fresh, readings, (3, 3), 99.0)[1].verdict == "best already"
    state, record = decide(rule, fresh, readings, (3, 3), 100.0)
    assert (record.verdict, record.shares) == ("trial", {"a": (2, 1), "b": (1, 2)})
    assert (state.moved_s, state.moves_since_trial) == (100.0, 0)
    assert decide(rule, fresh, readings, (3, 3), 100.0, urgent=True)[1].verdict == "best already"
    static = Rule(dwell_s=100.0, objective="static")
    assert decide(static, fresh, readings, (3, 3), 100.0)[1].verdict != "trial"

    unfair = [reading("a", (3, 0), (0.05, 0.05), **UNTRIED), reading("b", (0, 3), (0.9, 0.9))]
    assert decide(rule, fresh, unfair, (3, 3), 100.0)[1].verdict == "moved"
    waited = ControllerState(decided_s=0.0, moved_s=0.0, moves_since_trial=2)
    assert decide(rule, waited, unfair, (3, 3), 100.0)[1].verdict == "trial"
