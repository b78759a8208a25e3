"""Splits over several types of units: a local search by exchanges, in steps that halve.

With one type of unit `solver.best_split` is exact. With several types the best split is an integer programme. The
search adds replicas, shifts them between types, hands them to another policy, or swaps them across types, the best
change first, until no change helps.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.allocation.allocation_limits import LEAST_GAIN
from mrl.allocation.floors import keeps_floor, shares_at_floors
from mrl.allocation.objective import Reading
from mrl.allocation.solver import FloatArray

Counts = NDArray[np.int64]
Worth = Callable[[Reading, Counts], FloatArray]


class Change(NamedTuple):
    """Replicas that a policy gains or loses, per type."""

    policy: int
    counts_K: Counts


def best_typed_split(
    readings: Sequence[Reading],
    worth: Worth,
    capacity_units: tuple[int, ...],
    before: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[int, ...]]:
    """Return replicas per policy and type under the capacity of each type; a local optimum of the sum of worths.

    worth: worth of N candidate shares [N, types] of a policy.
    before: shares from which the search begins a second time. The better of the two local optima is taken, so that the
    split is never worse than these shares.
    Where the split still breaks a floor, the search begins once more from the floors: an exchange that ends below a
    floor gains nothing, so that the search cannot reach a floor by small steps.
    """
    largest_step = 1 << max(0, max(capacity_units).bit_length() - 2)
    search = _Search(readings, worth, capacity_units)
    search.climb(largest_step)
    if before is not None:
        again = _Search(readings, worth, capacity_units, before)
        again.climb(1)
        search = again if again.total() >= search.total() - LEAST_GAIN else search
    if search.num_below_floor():
        raised = _Search(readings, worth, capacity_units, shares_at_floors(readings, capacity_units))
        raised.climb(largest_step)
        search = raised if raised.num_below_floor() < search.num_below_floor() else search
    return [tuple(int(count) for count in row) for row in search.counts_NK]


class _Search:
    def __init__(
        self,
        readings: Sequence[Reading],
        worth: Worth,
        capacity_units: tuple[int, ...],
        start: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._readings, self._worth, num_types = readings, worth, len(capacity_units)
        self._size_N = np.array([reading.units_per_replica for reading in readings])
        self.counts_NK: Counts = np.zeros((len(readings), num_types), dtype=np.int64)
        if start is not None:
            self.counts_NK += np.array(start)
        self._free_K = np.array(capacity_units) - self._size_N @ self.counts_NK
        one_K = np.eye(num_types, dtype=np.int64)
        shifts = [one_K[new] - one_K[old] for old, new in itertools.permutations(range(num_types), 2)]
        self._own_MK = np.array([*one_K, *-one_K, *shifts])
        """Changes of a policy alone: one more of a type, one fewer, one on another type."""
        self._gifts_KOK = np.array([[one_K[new] * (new != old) - one_K[old] for new in range(num_types)]
                                    for old in range(num_types)])  # fmt: skip
        """Changes of a policy that make room on a type: one replica fewer there (the option of the type's own number),
        or one on another type."""
        self._gains: dict[tuple[int, int, int], FloatArray] = {}
        """Gains by policy, type on which room is made or -1, and number of replicas. A changed policy's gains are
        dropped."""

    def total(self) -> float:
        """Return the worth of all shares together."""
        return sum(float(self._worth(one, row[None, :])[0])
                   for one, row in zip(self._readings, self.counts_NK, strict=True))  # fmt: skip

    def num_below_floor(self) -> int:
        """Return the number of policies that have less than their floor."""
        return sum(not keeps_floor(one, row) for one, row in zip(self._readings, self.counts_NK, strict=True))

    def climb(self, step_units: int) -> None:
        """Make the best exchanges in steps that halve, until no exchange helps."""
        while step_units:
            while changes := self._best_exchange(step_units):
                self._apply(changes)
            step_units //= 2

    def _apply(self, changes: list[Change]) -> None:
        for policy, counts_K in changes:
            self.counts_NK[policy] += counts_K
            self._free_K -= counts_K * self._size_N[policy]
            self._gains = {key: gains for key, gains in self._gains.items() if key[0] != policy}

    def _best_exchange(self, step_units: int) -> list[Change] | None:
        """Return the changes that gain most together; None when no change gains."""
        count_N = np.maximum(1, step_units // self._size_N)
        gains_NM = np.array([self._gain(policy, -1, int(count)) for policy, count in enumerate(count_N)])
        used_NMK = self._own_MK * (count_N * self._size_N)[:, None, None]
        alone_NM = np.where((used_NMK <= self._free_K).all(axis=2), gains_NM, -np.inf)
        policy, own = np.unravel_index(np.argmax(alone_NM), alone_NM.shape)
        best, found = float(alone_NM[policy, own]), [Change(int(policy), self._own_MK[own] * count_N[policy])]
        for gain, changes in self._pairs(gains_NM, count_N):
            if gain > best:
                best, found = gain, changes
        return found if best > LEAST_GAIN else None

    def _pairs(self, gains_NM: FloatArray, count_N: Counts) -> Iterator[tuple[float, list[Change]]]:
        """Yield, for each change that needs room on a type and each amount of room, the best taker and giver."""
        units_N = count_N * self._size_N
        for own, direction_K in enumerate(self._own_MK):
            if direction_K.max() <= 0:
                continue
            kind = int(np.argmax(direction_K))
            # A taker's gain counts for its own size of step alone, so that takers of one size compete with each other.
            for units in np.unique(units_N):
                short = int(units - self._free_K[kind])
                if short <= 0:
                    continue
                taker_N = np.where(units_N == units, gains_NM[:, own], -np.inf)
                given_NO, replicas_N = self._given(kind, short, self._free_K - np.minimum(direction_K, 0) * units)
                found = _best_two(taker_N, given_NO.max(axis=1))
                if found is not None:
                    gain, taker, giver = found
                    gift_K = self._gifts_KOK[kind, int(np.argmax(given_NO[giver]))] * replicas_N[giver]
                    yield gain, [Change(taker, direction_K * count_N[taker]), Change(giver, gift_K)]

    def _given(self, kind: int, short: int, free_K: Counts) -> tuple[FloatArray, Counts]:
        """Return every policy's gain by each way to make room for `short` units, and the replicas that this takes."""
        replicas_N = -(-short // self._size_N)
        gains_NO = np.array([self._gain(policy, kind, int(count)) for policy, count in enumerate(replicas_N)])
        fits_NO = (replicas_N * self._size_N)[:, None] <= free_K
        fits_NO[:, kind] = True
        return np.where(fits_NO, gains_NO, -np.inf), replicas_N

    def _gain(self, policy: int, kind: int, count: int) -> FloatArray:
        """Return a policy's gains by its own changes (`kind` -1) or ways to make room on a type; -inf if impossible."""
        key = policy, kind, count
        if key not in self._gains:
            changes_XK = count * (self._own_MK if kind < 0 else self._gifts_KOK[kind])
            counts_XK = np.vstack([self.counts_NK[policy], self.counts_NK[policy] + changes_XK])
            worth_X = self._worth(self._readings[policy], np.maximum(counts_XK, 0))
            self._gains[key] = np.where((counts_XK[1:] >= 0).all(axis=1), worth_X[1:] - worth_X[0], -np.inf)
        return self._gains[key]


def _best_two(taker_N: FloatArray, giver_N: FloatArray) -> tuple[float, int, int] | None:
    """Return the largest sum of the gains of a taker and another policy that gives, with both; None if impossible."""
    # The best taker and the best giver may be one policy: then one of the two second best is in the best pair.
    takers, givers = np.argsort(-taker_N)[:2], np.argsort(-giver_N)[:2]
    pairs = [(float(taker_N[one] + giver_N[two]), int(one), int(two)) for one in takers for two in givers if one != two]
    best = max(pairs, default=(-np.inf, 0, 0))
    return best if best[0] > -np.inf else None
