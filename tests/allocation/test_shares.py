"""The rule that turns demands into whole slots."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.allocation.shares import fair_shares, progress_gain, split_evenly

demands = st.dictionaries(
    st.sampled_from("abcdef"), st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=6
)


@given(demands, st.integers(6, 2000), st.integers(1, 500))
def test_shares_sum_to_the_slots_and_keep_the_floor(wanted: dict[str, float], slots: int, floor: int) -> None:
    """Every slot is handed out, and nobody has less than the floor or, where that does not fit, an equal split."""
    shares = fair_shares(wanted, slots=slots, floor_slots=floor)

    assert sum(shares.values()) == slots
    assert min(shares.values()) >= min(floor, slots // len(wanted))


@given(
    st.lists(st.floats(0.5, 20.0), min_size=2, max_size=3),
    st.integers(3, 14),
    st.integers(1, 3),
)
def test_no_split_is_fairer_by_more_than_one_slot(rates: list[float], slots: int, floor: int) -> None:
    """Against all splits that keep the floor: the least progress is the best one, up to rounding by one slot."""
    wanted = dict(zip("abc", rates, strict=False))
    floor = min(floor, slots // len(wanted))
    shares = fair_shares(wanted, slots=slots, floor_slots=floor)

    splits = (s for s in itertools.product(range(floor, slots + 1), repeat=len(wanted)) if sum(s) == slots)
    best = max(min(a / d for a, d in zip(split, wanted.values(), strict=True)) for split in splits)
    assert min((shares[name] + 1) / demand for name, demand in wanted.items()) >= best


def test_shares_follow_demand_not_parameters() -> None:
    """Without floors in the way, shares are proportional to demand, within the pool and beyond it."""
    assert fair_shares({"a": 300.0, "b": 100.0}, slots=100, floor_slots=1) == {"a": 75, "b": 25}
    assert fair_shares({"a": 30.0, "b": 10.0}, slots=100, floor_slots=1) == {"a": 75, "b": 25}


def test_the_larger_remainder_is_rounded_up() -> None:
    """Of 2.4 and 7.6 slots the second gets the one that is left, whatever the order of names."""
    assert fair_shares({"a": 2.4, "b": 7.6}, slots=10, floor_slots=1) == {"a": 2, "b": 8}
    assert fair_shares({"a": 7.6, "b": 2.4}, slots=10, floor_slots=1) == {"a": 8, "b": 2}


def test_a_policy_under_its_floor_takes_from_the_others_in_proportion() -> None:
    """The floor of the smallest is paid by the rest of the pool."""
    assert fair_shares({"a": 60.0, "b": 30.0, "c": 1.0}, slots=100, floor_slots=10) == {"a": 60, "b": 30, "c": 10}


def test_a_policy_without_demand_gets_its_floor() -> None:
    """Demand 0 leaves the rest to the others; if nobody has demand the split is equal."""
    assert fair_shares({"a": 0.0, "b": 5.0}, slots=10, floor_slots=2) == {"a": 2, "b": 8}
    assert fair_shares({"a": 0.0, "b": 0.0}, slots=10, floor_slots=2) == {"a": 5, "b": 5}
    assert fair_shares({}, slots=10, floor_slots=2) == {}


@pytest.mark.parametrize(
    ("new", "gain"),
    [({"a": 50, "b": 50}, 0.0), ({"a": 60, "b": 40}, 0.2), ({"a": 40, "b": 60}, -0.2)],
)
def test_gain_is_that_of_the_least_progress(new: dict[str, int], gain: float) -> None:
    """Slots that make the one behind faster are a gain, slots taken from it a loss."""
    assert progress_gain({"a": 100.0, "b": 40.0}, new, {"a": 50, "b": 50}) == pytest.approx(gain)


def test_slots_beyond_the_demand_are_no_gain() -> None:
    """Where all learners are busy, moving slots gains nothing; from nothing to something is an infinite gain."""
    assert progress_gain({"a": 10.0, "b": 20.0}, {"a": 30, "b": 70}, {"a": 50, "b": 50}) == 0.0
    assert progress_gain({"a": 10.0}, {"a": 1}, {}) == math.inf


def test_an_even_split_differs_by_at_most_one() -> None:
    """Larger parts come first."""
    assert split_evenly(8, 3) == [3, 3, 2]
    assert split_evenly(1, 2) == [1, 0]
