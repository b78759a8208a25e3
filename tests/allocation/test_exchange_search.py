"""Splits over two types of units against enumeration."""

import itertools
import random

import numpy as np

from mrl.allocation.exchange_search import best_typed_split
from mrl.allocation.solver import FloatArray
from mrl.allocation.worth import ACCELERATORS, Reading, share_worth


def worth(reading: Reading, counts_NK: np.ndarray) -> FloatArray:
    """As in a decision of policies that are level."""
    return share_worth(reading, counts_NK, ACCELERATORS, progress=0.5, reference=0.5)


def total(readings: list[Reading], split: list[tuple[int, ...]]) -> float:
    """Worth of a split."""
    return sum(float(worth(one, np.array([counts]))[0]) for one, counts in zip(readings, split, strict=True))


def make_readings(rng: random.Random) -> list[Reading]:
    """Three policies whose rates differ between the types; the first cannot run on the second type."""
    readings = []
    for index in range(3):
        demand, gang = rng.uniform(1.0, 5.0), rng.choice((1, 1, 2))
        rate = 0.0 if index == 0 else rng.uniform(0.3, 1.5)
        readings.append(
            Reading(
                policy=f"p{index}",
                replicas=(1, 0),
                progress_per_replica=(gang / demand, rate * gang / demand),
                supply_progress=0.5,
                units_per_replica=gang,
                switch_s=10.0,
            )
        )
    return readings


def test_the_search_keeps_the_capacity_and_is_near_the_best() -> None:
    """Within 3 percent of the best of all splits in each of 25 pools, and the best in most of them."""
    rng, capacity = random.Random(3), (4, 4)
    hits = 0
    for _ in range(25):
        readings = make_readings(rng)
        found = best_typed_split(readings, worth, capacity)
        used = np.array(found).T @ np.array([one.units_per_replica for one in readings])
        assert (used <= np.array(capacity)).all()
        rows = [list(itertools.product(*(range(units // one.units_per_replica + 1) for units in capacity)))
                for one in readings]  # fmt: skip
        sizes = np.array([one.units_per_replica for one in readings])
        best = max(
            total(readings, list(split))
            for split in itertools.product(*rows)
            if (np.array(split).T @ sizes <= np.array(capacity)).all()
        )
        reached = total(readings, found)
        assert reached >= best - 0.03 * abs(best)
        hits += reached >= best - 1e-9
    assert hits >= 20


def test_a_policy_gets_nothing_where_it_cannot_run() -> None:
    """Units of the second type are of no use to the first policy."""
    found = best_typed_split(make_readings(random.Random(1)), worth, (4, 4))
    assert found[0][1] == 0
    assert found[0][0] > 0
