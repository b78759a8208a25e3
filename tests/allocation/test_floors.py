"""Floors on several types of units against enumeration."""

import itertools
import random
from collections.abc import Iterator

import pytest

from mrl.allocation.floors import competing_policies, floors_that_hold, keeps_floor, shares_at_floors
from mrl.allocation.objective import Reading

Split = list[tuple[int, ...]]


def measured(policy: str, speeds: tuple[float, ...], **more: object) -> Reading:
    """A policy that has nothing now."""
    known = {"policy": policy, "replicas": (0,) * len(speeds), "progress_per_replica": speeds, "supply_progress": 0.5}
    return Reading(**(known | more))  # type: ignore[arg-type]


def pool(rng: random.Random, sizes: tuple[int, ...]) -> tuple[list[Reading], tuple[int, ...]]:
    """Two or three policies on two types."""
    readings = [
        measured(
            f"p{index}", (rng.choice((0.0, 0.2, 0.3)), 0.25),
            units_per_replica=rng.choice(sizes), floor_replicas=rng.randint(1, 3), silent=rng.random() < 0.1,
        )
        for index in range(rng.randint(2, 3))
    ]  # fmt: skip
    return readings, (rng.randint(0, 5), rng.randint(0, 5))


def splits(readings: list[Reading], capacity: tuple[int, ...]) -> Iterator[Split]:
    """All that fit."""
    rows = [list(itertools.product(*(range(units // one.units_per_replica + 1) for units in capacity)))
            for one in readings]  # fmt: skip
    for split in itertools.product(*rows):
        if fits(readings, list(split), capacity):
            yield list(split)


def fits(readings: list[Reading], split: Split, capacity: tuple[int, ...]) -> bool:
    used = [sum(row[kind] * one.units_per_replica for one, row in zip(readings, split, strict=True))
            for kind in range(len(capacity))]  # fmt: skip
    return all(have <= units for have, units in zip(used, capacity, strict=True))


def num_kept(readings: list[Reading], split: Split) -> int:
    return sum(keeps_floor(one, row) for one, row in zip(readings, split, strict=True))


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("seed", range(40))
def test_as_many_floors_are_kept_as_any_split_keeps(seed: int, sizes: tuple[int, ...]) -> None:
    """And nobody has more than its floor, or anything where it does not run."""
    readings, capacity = pool(random.Random(seed), sizes)
    found = shares_at_floors(readings, capacity)
    assert fits(readings, found, capacity)
    assert num_kept(readings, found) == max(num_kept(readings, split) for split in splits(readings, capacity))
    for one, row in zip(readings, found, strict=True):
        assert sum(row) in ((0,) if one.silent else (0, one.floor_replicas))
        assert not any(count for count, speed in zip(row, one.progress_per_replica or (), strict=True) if not speed)
    floors = {one.policy: 0 if one.silent else one.floor_replicas for one in readings}
    is_enough = num_kept(readings, found) == len(readings)
    assert (not competing_policies(readings, floors, capacity)) == is_enough


def test_small_floors_are_kept_rather_than_one_large_one() -> None:
    """Three units are two floors of one unit, or one of three."""
    readings = [measured(name, (0.2, 0.2), floor_replicas=floor) for name, floor in {"a": 3, "b": 1, "c": 1}.items()]
    assert sorted(map(sum, shares_at_floors(readings, (2, 1)))) == [0, 1, 1]


def test_who_is_too_large_for_what_is_left_takes_nothing_from_others() -> None:
    """A gang of four where three units are left: the other one keeps its floor."""
    readings = [measured("a", (0.2,), floor_replicas=2), measured("b", (0.2,), units_per_replica=4)]
    assert floors_that_hold(readings, (3,)) == ({"a": 2, "b": 0}, {"b"})
    assert floors_that_hold(readings, (4,)) == ({"a": 0, "b": 0}, {"a", "b"})


def test_a_floor_is_where_replicas_are_and_then_where_they_are_fast() -> None:
    """The second policy has nothing yet."""
    readings = [measured("a", (0.4, 0.1), replicas=(0, 1), floor_replicas=2), measured("b", (0.1, 0.2))]
    assert shares_at_floors(readings, (2, 2)) == [(0, 2), (1, 0)]
    assert shares_at_floors(readings[1:], (2, 2)) == [(0, 1)]


def test_floors_are_lowered_for_those_alone_who_compete() -> None:
    """Two on the two units of one type; the third has its own type, and a fourth is silent."""
    readings = [
        measured("a", (0.2, 0.0), floor_replicas=2),
        measured("b", (0.2, 0.0), floor_replicas=2),
        measured("c", (0.2, 0.2), floor_replicas=2),
        measured("d", (0.2, 0.2), floor_replicas=2, silent=True),
    ]
    full = {"a": 2, "b": 2, "c": 2, "d": 0}
    assert floors_that_hold(readings, (4, 2)) == (full, frozenset())
    assert floors_that_hold(readings, (6, 0)) == (full, frozenset())
    assert floors_that_hold(readings, (3, 2)) == (full | {"a": 1, "b": 1}, frozenset())
    assert floors_that_hold(readings, (1, 2)) == (full | {"a": 0, "b": 0}, {"a", "b"})
    assert floors_that_hold(readings, (1, 1)) == ({"a": 0, "b": 0, "c": 1, "d": 0}, {"a", "b"})
    assert floors_that_hold(readings, (2, 0)) == ({"a": 0, "b": 0, "c": 0, "d": 0}, {"a", "b", "c"})


def test_without_floors_turns_are_taken_where_not_everybody_can_have_one() -> None:
    """As with floors; who has a type of its own waits for nobody."""
    readings = [measured(name, speeds, floor_replicas=0) for name, speeds in
                {"a": (0.2, 0.0), "b": (0.2, 0.0), "c": (0.0, 0.2)}.items()]  # fmt: skip
    assert floors_that_hold(readings, (2, 1)).taking_turns == frozenset()
    assert floors_that_hold(readings, (1, 1)).taking_turns == {"a", "b"}
    assert floors_that_hold(readings, (1, 1)).replicas == {"a": 0, "b": 0, "c": 0}
    assert floors_that_hold(readings, (2, 0)).taking_turns == {"c"}
