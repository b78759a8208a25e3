"""The worth of a share against the formula, one candidate at a time."""

import math

import msgspec
import numpy as np
import pytest

from mrl.allocation.objective import BELOW_FLOOR, Reading, Rule, share_worth

READING = Reading(
    policy="a",
    replicas=(2,),
    progress_per_replica=(2 / 7.0,),
    supply_progress=0.6,
    units_per_replica=2,
    switch_s=30.0,
    weight=0.5,
    learner_tokens_per_s=4000.0,
)


def slow_worth(reading: Reading, count: int, rule: Rule, progress: float, reference: float) -> float:
    """One candidate of one type, as the reference writes it."""
    if count < reading.floor_replicas:
        return BELOW_FLOOR
    units, demand, weight = reading.units_per_replica, reading.demand_units, 1.0
    serving = max(0.0, count - max(0, count - reading.replicas[0]) * reading.switch_s / rule.hold_s)
    x = units * serving / demand
    fed = x / (1 + x**rule.smoothness) ** (1 / rule.smoothness) - rule.price * units * count / demand
    if rule.objective == "throughput":
        return fed * reading.learner_tokens_per_s
    if rule.objective == "weighted":
        weight = reading.weight
    z = progress + (1 - math.exp(-rule.hold_s / rule.window_s)) * (fed - progress)
    return -demand * weight / rule.sharpness * math.exp(-rule.sharpness * (z / weight - reference))


@pytest.mark.parametrize("objective", ["max_min", "weighted", "throughput"])
def test_worth_is_that_of_the_formula(objective: str) -> None:
    """For every number of replicas, with a switching price, a floor and a weight."""
    rule = Rule(objective=objective)
    found = share_worth(READING, np.arange(7)[:, None], rule, progress=0.55, reference=0.5)
    wanted = [slow_worth(READING, count, rule, 0.55, 0.5) for count in range(7)]
    assert found == pytest.approx(wanted, rel=1e-9)


def test_a_large_supply_is_one_and_no_overflow() -> None:
    """Ten thousand times the demand is worth no more than the demand, less its price."""
    reading = msgspec.structs.replace(READING, progress_per_replica=(1e4,), switch_s=0.0)
    rule = Rule(price=0.0, objective="throughput")
    found = share_worth(reading, np.array([[1], [2]]), rule, progress=0.5, reference=0.5)
    assert found == pytest.approx([4000.0, 4000.0])


@pytest.mark.parametrize("demand", [0.001, 0.02, 0.05, 0.5])
def test_the_only_replica_is_worth_its_price_however_small_the_demand(demand: float) -> None:
    """A learner that takes a thousandth of what an engine makes still needs an engine."""
    reading = msgspec.structs.replace(READING, replicas=(0,), progress_per_replica=(1 / demand,), switch_s=0.0)
    found = share_worth(reading, np.arange(3)[:, None], Rule(), progress=0.5, reference=0.5)
    assert found[1] > found[0]


def test_a_silent_policy_gains_from_nothing() -> None:
    """Every unit it holds is a loss, so it gets none; its floor does not hold."""
    reading = msgspec.structs.replace(READING, silent=True)
    found = share_worth(reading, np.arange(4)[:, None], Rule(), progress=0.1, reference=0.1)
    assert np.argmax(found) == 0
    assert (np.diff(found) < 0).all()


def test_types_add_up_by_what_a_replica_feeds() -> None:
    """Where a replica of one type feeds twice as much as of the other, one of each is worth three of the slower."""
    reading = msgspec.structs.replace(READING, replicas=(0, 0), progress_per_replica=(0.2, 0.1), switch_s=0.0)
    found = share_worth(reading, np.array([[1, 1], [0, 3]]), Rule(), progress=0.5, reference=0.5)
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("objective", ["max_min", "weighted", "throughput"])
@pytest.mark.parametrize("progress_per_replica", [1e-3, 1e-9, 3e-13, 5e-300])
def test_a_floor_is_worth_more_than_anything_below_it(objective: str, progress_per_replica: float) -> None:
    """However slow an engine was found to be, however small the weight, and however far behind the policy is."""
    reading = msgspec.structs.replace(
        READING, progress_per_replica=(progress_per_replica,), replicas=(0,), floor_replicas=2, weight=0.01
    )
    reference = 0.9 / (0.01 if objective == "weighted" else 1.0)
    worth = share_worth(reading, np.arange(6)[:, None], Rule(objective=objective), progress=0.9, reference=reference)
    assert np.isfinite(worth).all()
    assert worth[:2].max() < worth[2:].min()
