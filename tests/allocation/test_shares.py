"""Whole replicas by weight, and slots over workers."""

from mrl.allocation.shares import proportional_split, split_evenly
from mrl.allocation.worth import Reading


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
