"""The exact split of one pool: how many replicas each policy gets, so that the sum of their worth is highest.

A dynamic programme over capacities (allocation in the paper: MWRA). A policy never gets more replicas than where its
own worth peaks, which loses nothing and keeps the work near policies * units instead of policies * units^2.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def best_split(values: Sequence[FloatArray], replica_units: Sequence[int], capacity_units: int) -> list[int]:
    """Return the n_i >= 0 that maximise sum_i values[i][n_i] under sum_i replica_units[i] * n_i <= capacity_units.

    n_i is the number of replicas of policy i, and `values[i][n]` the worth of n of them; a policy gets at most
    len(values[i]) - 1. Of equal splits the one with fewer replicas for the later policy wins, so that the answer is one
    and the same each time.
    """
    if not values:
        return []
    step = math.gcd(*replica_units)
    capacity = capacity_units // step
    sizes = [units // step for units in replica_units]
    best_C = np.zeros(capacity + 1)
    choices = []
    for worth, size in zip(values, sizes, strict=True):
        best_C, choice_C = _with_one_more(best_C, worth, size)
        choices.append(choice_C)
    return _backtrack(choices, sizes, capacity)


def _with_one_more(before_C: FloatArray, worth: FloatArray, size: int) -> tuple[FloatArray, NDArray[np.int32]]:
    """Return the best worth for every capacity once this policy is served too, and how many replicas it has there."""
    capacity = len(before_C) - 1
    best_C = before_C + worth[0]
    choice_C = np.zeros(capacity + 1, dtype=np.int32)
    most = min(int(np.argmax(worth)), capacity // size)
    for count in range(1, most + 1):
        taken = count * size
        candidate = before_C[: capacity + 1 - taken] + worth[count]
        better = candidate > best_C[taken:]
        np.copyto(best_C[taken:], candidate, where=better)
        choice_C[taken:][better] = count
    return best_C, choice_C


def _backtrack(choices: Sequence[NDArray[np.int32]], sizes: Sequence[int], capacity: int) -> list[int]:
    counts = []
    for choice_C, size in zip(reversed(choices), reversed(sizes), strict=True):
        counts.append(int(choice_C[capacity]))
        capacity -= counts[-1] * size
    return counts[::-1]
