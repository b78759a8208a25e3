"""The exact split against enumeration."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mrl.allocation.solver import FloatArray, best_split


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[FloatArray], list[int], int]:
    """Two to four policies with gangs of 1, 2 or 4 units and any worth, on 4 to 10 units."""
    capacity = draw(st.integers(4, 10))
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4))
    worth = st.floats(-10.0, 10.0)
    rows = [draw(st.lists(worth, min_size=capacity // size + 1, max_size=capacity // size + 1)) for size in sizes]
    return [np.array(row) for row in rows], sizes, capacity


@given(problems())
def test_the_split_is_as_good_as_the_best_of_all(problem: tuple[list[FloatArray], list[int], int]) -> None:
    """Whatever the worths, concave or not."""
    values, sizes, capacity = problem
    found = best_split(values, sizes, capacity)

    def worth(counts: tuple[int, ...]) -> float:
        return float(sum(row[count] for row, count in zip(values, counts, strict=True)))

    every = itertools.product(*(range(len(row)) for row in values))
    allowed = [counts for counts in every if np.dot(counts, sizes) <= capacity]
    assert tuple(found) in allowed
    assert abs(worth(tuple(found)) - max(map(worth, allowed))) < 1e-9


def test_equal_splits_are_decided_for_fewer_replicas() -> None:
    """What gains nothing is not started; of two that gain as much the first is served; no policies, no replicas."""
    assert best_split([np.zeros(5), np.array([0.0, 1.0, 1.0, 1.0, 1.0])], [1, 1], 4) == [0, 1]
    assert best_split([np.array([0.0, 1.0])] * 2, [1, 1], 1) == [1, 0]
    assert best_split([], [], 4) == []


def test_units_that_no_whole_gang_fills_stay_free() -> None:
    """Gangs of two and four on seven units: three replicas of two, or one of each size."""
    pairs, fours = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 2.5])
    assert best_split([pairs, fours], [2, 4], 7) == [1, 1]
    assert best_split([pairs, np.array([0.0, 0.5])], [2, 4], 7) == [3, 0]
