"""Whole replicas by weight, and slots over workers."""

import itertools
import random

import pytest

from mrl.allocation.objective import Reading
from mrl.allocation.proportional import proportional_split, split_evenly


def test_an_even_split_differs_by_at_most_one() -> None:
    """Larger parts come first."""
    assert split_evenly(8, 3) == [3, 3, 2]
    assert split_evenly(1, 2) == [1, 0]


def unmeasured(policy: str, units: int = 1, **more: object) -> Reading:
    """A policy of which nothing is known yet."""
    known = {"policy": policy, "replicas": (0,), "progress_per_replica": None, "supply_progress": None,
             "units_per_replica": units}  # fmt: skip
    return Reading(**(known | more))  # type: ignore[arg-type]


def test_whole_replicas_are_given_by_largest_remainder() -> None:
    """Weights of 5 and 3 on ten units; a gang of four for the third, whose part of two units is too small for it."""
    readings = [unmeasured("a", weight=5.0), unmeasured("b", weight=3.0), unmeasured("c", 4, weight=2.0)]
    assert proportional_split(readings, (10,), by_weight=True) == {"a": (4,), "b": (2,), "c": (1,)}
    assert proportional_split(readings[:2], (10,), by_weight=False) == {"a": (5,), "b": (5,)}


def test_the_silent_get_nothing_and_floors_reach_as_far_as_the_units() -> None:
    """Floors are served in order; the last one finds no unit left."""
    readings = [unmeasured("a", floor_replicas=2), unmeasured("b", 2), unmeasured("c"), unmeasured("d", silent=True)]
    assert proportional_split(readings, (4,), by_weight=False) == {"a": (2,), "b": (1,), "c": (0,), "d": (0,)}


def test_nobody_gets_a_unit_on_which_its_engine_does_not_fit() -> None:
    """Also before anything was measured."""
    second = unmeasured("a", replicas=(0, 0), unfit=(True, False))
    both = unmeasured("b", replicas=(0, 0))
    assert proportional_split([second, both], (4, 4), by_weight=False) == {"a": (0, 2), "b": (4, 2)}


def test_a_floor_counts_over_all_types_and_only_where_the_policy_runs() -> None:
    """The first policy runs on the second type alone."""
    only_second = unmeasured("a", replicas=(0, 0), progress_per_replica=(0.0, 0.1))
    both = unmeasured("b", replicas=(0, 0), progress_per_replica=(0.1, 0.1))
    assert proportional_split([only_second, both], (4, 4), by_weight=False) == {"a": (0, 2), "b": (4, 2)}


def totals(readings: list[Reading], capacity: tuple[int, ...], *, by_weight: bool = False) -> list[int]:
    """Replicas of every policy, on whatever type; asserts what holds for every split."""
    split = proportional_split(readings, capacity, by_weight=by_weight)
    for one in readings:
        assert not any(count and unfit for count, unfit in zip(split[one.policy], one.unfit, strict=bool(one.unfit)))
    for kind, units in enumerate(capacity):
        assert sum(split[one.policy][kind] * one.units_per_replica for one in readings) <= units
    return [sum(split[one.policy]) for one in readings]


@pytest.mark.parametrize(
    ("policies", "capacity", "wanted"),
    [
        ("ab", (3, 3), [3, 3]),
        ("ab", (1, 1, 1, 1), [2, 2]),
        ("abc", (1,) * 6, [2, 2, 2]),
        ("abc", (2, 2), [1, 1, 2]),
        ("abcd", (3, 3, 3), [2, 2, 2, 3]),
    ],
)
def test_equal_policies_differ_by_at_most_one_over_all_types(
    policies: str, capacity: tuple[int, ...], wanted: list[int]
) -> None:
    """What is left over of one type goes to another policy than what is left over of the next."""
    readings = [unmeasured(policy, replicas=(0,) * len(capacity)) for policy in policies]
    assert totals(readings, capacity) == wanted


@pytest.mark.parametrize("floor", [0, 1])
def test_who_fits_one_type_only_finds_room_there(floor: int) -> None:
    """Though the others come first, and would fit it too."""
    a = unmeasured("a", replicas=(0, 0), floor_replicas=floor)
    b = unmeasured("b", replicas=(0, 0), floor_replicas=floor, unfit=(False, True))
    assert proportional_split([a, b], (1, 1), by_weight=False) == {"a": (0, 1), "b": (1, 0)}
    c = unmeasured("c", replicas=(0, 0), floor_replicas=2 * floor, unfit=(False, True))
    assert totals([a, b, c], (3, 2)) == [3 - floor, 1, 1 + floor]


def test_replicas_stay_on_the_type_on_which_they_are() -> None:
    """Also those of who comes last; what there is besides is shared as ever."""
    readings = [unmeasured("a", replicas=(2, 2), floor_replicas=4), unmeasured("b", replicas=(2, 2), floor_replicas=4)]
    assert proportional_split(readings, (4, 4), by_weight=False) == {"a": (2, 2), "b": (2, 2)}
    assert proportional_split(readings, (5, 5), by_weight=False) == {"a": (2, 3), "b": (3, 2)}


def test_replicas_stay_though_another_mix_of_types_would_do() -> None:
    """New ones come to each type in proportion."""
    here, new = [(4, 0), (0, 4)], [(0, 0), (0, 0)]
    for replicas, wanted in ((here, here), (new, [(2, 2), (2, 2)])):
        readings = [unmeasured(name, replicas=row, floor_replicas=4) for name, row in zip("ab", replicas, strict=True)]
        assert list(proportional_split(readings, (4, 4), by_weight=False).values()) == wanted


def test_the_silent_leave_their_part_to_the_others() -> None:
    """On every type."""
    readings = [unmeasured("a", replicas=(0, 0)), unmeasured("b", replicas=(1, 1), silent=True)]
    assert proportional_split(readings, (3, 2), by_weight=True) == {"a": (3, 2), "b": (0, 0)}


def has_room(counts: list[int], readings: list[Reading], capacity: tuple[int, ...]) -> bool:
    """Hall's condition: no set of policies has more replicas than there is room on the types that one of them fits."""
    for size in range(1, len(readings) + 1):
        for some in itertools.combinations(range(len(readings)), size):
            kinds = [kind for kind in range(len(capacity)) if any(not readings[one].unfit[kind] for one in some)]
            room = sum(capacity[kind] // readings[0].units_per_replica for kind in kinds)
            if sum(counts[one] for one in some) > room:
                return False
    return True


def slow_totals(readings: list[Reading], capacity: tuple[int, ...]) -> list[int]:
    """Floors in order, then replica by replica to whoever is furthest below its part of each type."""
    counts = [0] * len(readings)

    def add(index: int) -> bool:
        counts[index] += 1
        if not has_room(counts, readings, capacity):
            counts[index] -= 1
            return False
        return True

    quotas = []
    for one in readings:
        parts = [units * one.weight / sum(other.weight for other in readings if not other.unfit[kind])
                 for kind, units in enumerate(capacity) if one.weight and not one.unfit[kind]]  # fmt: skip
        quotas.append(sum(part / one.units_per_replica for part in parts))
    for index, one in enumerate(readings):
        while counts[index] < one.floor_replicas and add(index):
            pass
    left = {index for index, quota in enumerate(quotas) if quota}
    while left:
        index = max(left, key=lambda index: (quotas[index] - counts[index], readings[index].policy))
        if not add(index):
            left.remove(index)
    return counts


def test_replicas_are_shared_as_the_slow_twin_shares_them() -> None:
    """One to three types, which not everybody fits; weights, floors and gangs of one size."""
    for seed in range(150):
        readings, capacity = some_readings(random.Random(seed))
        assert totals(readings, capacity, by_weight=True) == slow_totals(readings, capacity), seed


def some_readings(rng: random.Random) -> tuple[list[Reading], tuple[int, ...]]:
    """Policies, and how many units of each type there are."""
    num_types, gang = rng.randint(1, 3), rng.choice((1, 1, 2))
    readings = [
        unmeasured(
            policy, gang, replicas=tuple(rng.randint(0, 2) for _ in range(num_types)), weight=rng.choice((0.0, 0.5, 1)),
            unfit=tuple(rng.random() < 0.3 for _ in range(num_types)), floor_replicas=rng.randint(0, 2),
        )
        for policy in rng.sample("abcd", rng.randint(1, 4))
    ]  # fmt: skip
    return readings, tuple(rng.randint(0, 7) for _ in range(num_types))
