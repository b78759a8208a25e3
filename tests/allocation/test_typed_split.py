"""Splits over two types of units against enumeration."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from mrl.allocation.objective import Reading, Rule, share_worth
from mrl.allocation.solver import FloatArray
from mrl.allocation.typed_split import best_typed_split


def worth(reading: Reading, counts_NK: np.ndarray) -> FloatArray:
    """As in a decision of policies that are level."""
    return share_worth(reading, counts_NK, Rule(), progress=0.5, reference=0.5)


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
        fitting = (
            list(split) for split in itertools.product(*rows)
            if (np.array(split).T @ sizes <= np.array(capacity)).all()
        )  # fmt: skip
        best_split = max(fitting, key=lambda split: total(readings, split))
        best, reached = total(readings, best_split), total(readings, found)
        kept = best_typed_split(readings, worth, capacity, best_split)
        assert total(readings, kept) >= best - 1e-9, "what was there and is better is kept"
        assert reached >= best - 0.03 * abs(best)
        hits += reached >= best - 1e-9
    assert 20 <= hits < 25, "of the rest it is told that a better start is kept"


def test_a_policy_gets_nothing_where_it_cannot_run() -> None:
    """Units of the second type are of no use to the first policy."""
    found = best_typed_split(make_readings(random.Random(1)), worth, (4, 4))
    assert found[0][1] == 0
    assert found[0][0] > 0


def all_exchanges(readings: list[Reading], free: list[int], step: int) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """Every change of one policy, and of one that takes with one that gives: [(policy, counts of each type)]."""
    types = range(len(free))
    alone: dict[int, list[tuple[int, ...]]] = {}
    for index, one in enumerate(readings):
        count = max(1, step // one.units_per_replica)
        alone[index] = []
        for kind in types:
            alone[index].append(tuple(count * (other == kind) for other in types))
            alone[index].append(tuple(-count * (other == kind) for other in types))
        for old, new in itertools.permutations(types, 2):
            alone[index].append(tuple(count * ((other == new) - (other == old)) for other in types))
        yield from ([(index, change)] for change in alone[index])
    for taker, giver in itertools.permutations(alone, 2):
        for taken in alone[taker]:
            kind = max(types, key=lambda kind: taken[kind])
            short = taken[kind] * readings[taker].units_per_replica - free[kind]
            if taken[kind] > 0 and short > 0:
                count = -(-short // readings[giver].units_per_replica)
                for new in types:
                    given = tuple(count * ((other == new) * (new != kind) - (other == kind)) for other in types)
                    yield [(taker, taken), (giver, given)]


def slow_search(readings: list[Reading], capacity: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The best exchange again and again, by trying all of them."""
    counts, step = [[0] * len(capacity) for _ in readings], 1 << max(0, max(capacity).bit_length() - 2)
    while step:
        used = [sum(row[kind] * one.units_per_replica for row, one in zip(counts, readings, strict=True))
                for kind in range(len(capacity))]  # fmt: skip
        best, found = total(readings, [tuple(row) for row in counts]) + 1e-12, None
        for changes in all_exchanges(readings, [a - b for a, b in zip(capacity, used, strict=True)], step):
            tried = [list(row) for row in counts]
            for index, change in changes:
                tried[index] = [a + b for a, b in zip(tried[index], change, strict=True)]
            fits = all(
                sum(row[kind] * one.units_per_replica for row, one in zip(tried, readings, strict=True)) <= units
                for kind, units in enumerate(capacity)
            )
            if fits and min(map(min, tried)) >= 0 and total(readings, [tuple(row) for row in tried]) > best:
                best, found = total(readings, [tuple(row) for row in tried]), tried
        if found is None:
            step //= 2
        else:
            counts = found
    return [tuple(row) for row in counts]


@pytest.mark.parametrize("capacity", [(3, 5), (4, 2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_trying_every_exchange_finds(seed: int, capacity: tuple[int, ...]) -> None:
    rng, num_types = random.Random(seed), len(capacity)
    readings = [
        Reading(
            policy=f"p{index}", replicas=(1,) * num_types, supply_progress=0.5, switch_s=10.0,
            units_per_replica=rng.choice((1, 1, 2)),
            progress_per_replica=tuple(rng.uniform(0.1, 0.8) for _ in capacity),
        )
        for index in range(3)
    ]  # fmt: skip
    assert best_typed_split(readings, worth, capacity) == slow_search(readings, capacity)


def test_what_was_there_is_kept_where_the_search_finds_nothing_better() -> None:
    """And from something bad it climbs as far as from nothing."""
    rng = random.Random(4)
    for _ in range(10):
        readings = make_readings(rng)
        found = best_typed_split(readings, worth, (4, 4))
        again = best_typed_split(readings, worth, (4, 4), found)
        assert total(readings, again) >= total(readings, found) - 1e-9
        assert best_typed_split(readings, worth, (4, 4), again) == again
        bad = [(0, 4 // readings[0].units_per_replica), (0, 0), (0, 0)]
        assert total(readings, best_typed_split(readings, worth, (4, 4), bad)) >= total(readings, found) - 1e-9


def test_a_large_pool_of_two_types_is_split_within_its_capacity() -> None:
    """64 policies on 4,096 units; near what a fractional split of the same worths would be is not asked here."""
    rng = random.Random(1)
    readings = []
    for index in range(64):
        demand, gang = rng.uniform(20.0, 110.0), rng.choice((1, 1, 2, 4))
        per_replica = (gang / demand, rng.uniform(0.3, 1.2) * gang / demand)
        readings.append(Reading(policy=f"p{index}", replicas=(0, 0), progress_per_replica=per_replica,
                                supply_progress=0.5, units_per_replica=gang))  # fmt: skip
    found = np.array(best_typed_split(readings, worth, (2048, 2048)))
    sizes = np.array([one.units_per_replica for one in readings])
    assert (found.T @ sizes <= 2048).all()
    fed = [min(1.0, float(np.dot(one.progress_per_replica or (), row))) for one, row in
           zip(readings, found, strict=True)]  # fmt: skip
    assert max(fed) - min(fed) < 0.1, "level policies end up level"


def test_nothing_is_moved_to_where_it_does_not_run_to_make_room() -> None:
    """Of the only type on which it runs the first policy gives a unit; it gets none of the other type for it."""
    readings = [
        Reading(policy="a", replicas=(0, 0), progress_per_replica=(0.0, 0.9), supply_progress=0.5, floor_replicas=0),
        Reading(policy="b", replicas=(0, 0), progress_per_replica=(0.0, 0.2), supply_progress=0.5),
    ]
    found = best_typed_split(readings, worth, (4, 4), [(0, 4), (0, 0)])
    assert [counts[0] for counts in found] == [0, 0]
    assert found[1][1] >= 1
    assert best_typed_split(readings, worth, (4, 4), [(2, 1), (1, 3)])[0][0] == 0


@pytest.mark.parametrize(("units", "floor"), [(3, 2), (4, 3), (8, 6)])
@pytest.mark.parametrize("now", [(0, 0), (1, 1)])
def test_floors_above_the_largest_step_are_kept(units: int, floor: int, now: tuple[int, int]) -> None:
    """On the way from nothing no exchange gains anything before a floor is reached."""
    readings = [
        Reading(policy=policy, replicas=now, progress_per_replica=(0.25, 0.2), supply_progress=0.5,
                floor_replicas=floor, switch_s=10.0)
        for policy in "ab"
    ]  # fmt: skip
    found = best_typed_split(readings, worth, (units, units))
    assert min(map(sum, found)) >= floor
    assert best_typed_split(readings, worth, (units, units), [(0, 0), (1, 1)]) == found, "what was there broke a floor"


def test_from_the_floors_the_search_goes_on() -> None:
    """Policies that need more than their floors get all there is."""
    readings = [Reading(policy=policy, replicas=(0, 0), progress_per_replica=(0.1, 0.08), supply_progress=0.5,
                        floor_replicas=6) for policy in "ab"]  # fmt: skip
    found = best_typed_split(readings, worth, (8, 8))
    assert sum(map(sum, found)) == 16
    assert min(map(sum, found)) >= 6


@pytest.mark.parametrize("seed", range(30))
def test_no_floor_is_broken_where_all_can_hold(seed: int) -> None:
    """Four policies, of which some run on some types only, and as many units as their floors need, or a few more."""
    rng, num_types = random.Random(seed), 3
    seats = [[rng.randint(0, 3) for _ in range(num_types)] for _ in range(4)]
    readings = [
        Reading(
            policy=f"p{index}", replicas=(0,) * num_types, supply_progress=0.5, floor_replicas=sum(row),
            progress_per_replica=tuple(rng.uniform(0.05, 0.5) * (bool(count) or rng.random() < 0.5) for count in row),
        )
        for index, row in enumerate(seats)
    ]  # fmt: skip
    capacity = tuple(sum(row[kind] for row in seats) + rng.randint(0, 1) for kind in range(num_types))
    found = best_typed_split(readings, worth, capacity)
    assert (np.array(found).sum(axis=0) <= capacity).all()
    for one, row in zip(readings, found, strict=True):
        assert np.dot(row, np.array(one.progress_per_replica) > 0.0) >= one.floor_replicas
