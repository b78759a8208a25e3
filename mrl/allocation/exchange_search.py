"""Splits over several types of units: a search by exchanges, in steps that halve.

With one type the solver is exact. With several, the best split is an integer programme; here replicas are added,
shifted between types, taken over by another policy, or swapped across types, the best change first, until none helps.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.allocation.solver import FloatArray
from mrl.allocation.worth import Reading

Worth = Callable[[Reading, NDArray[np.int64]], FloatArray]
LEAST_GAIN = 1e-12

Change = tuple[int, tuple[int, ...]]
"""(policy, replicas gained or lost per type)."""


def best_typed_split(
    readings: Sequence[Reading],
    worth: Worth,
    capacity_units: tuple[int, ...],
    before: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[int, ...]]:
    """Replicas per policy and type under the capacity of each type; a local optimum of the sum of worths.

    worth: worth of N candidate shares [N, types] of a policy. before: shares from which the search begins a second
    time; of two local optima the better one is taken, so that the answer is never worse than what was there.
    """
    search = _Search(readings, worth, capacity_units)
    search.climb(1 << max(0, max(capacity_units).bit_length() - 2))
    if before is not None:
        again = _Search(readings, worth, capacity_units, before)
        again.climb(1)
        search = again if again.total >= search.total - LEAST_GAIN else search
    return [tuple(int(count) for count in row) for row in search.counts_NK]


@dataclass
class _Search:
    readings: Sequence[Reading]
    worth: Worth
    capacity_units: tuple[int, ...]
    start: Sequence[tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        num_types = len(self.capacity_units)
        self.size_N = np.array([reading.units_per_replica for reading in self.readings])
        self.counts_NK = np.zeros((len(self.readings), num_types), dtype=np.int64)
        if self.start is not None:
            self.counts_NK += np.array(self.start)
        self.free_K = np.array(self.capacity_units) - self.size_N @ self.counts_NK
        self._worths = [self._worth(index, self.counts_NK[index]) for index in range(len(self.readings))]
        self._gains: dict[Change, float] = {}

    @property
    def total(self) -> float:
        """Worth of all shares together."""
        return sum(self._worths)

    def climb(self, step_units: int) -> None:
        """Make the best exchanges in steps that halve, until none helps."""
        while step_units:
            while changes := self.best_exchange(step_units):
                self.apply(changes)
            step_units //= 2

    def best_exchange(self, step_units: int) -> list[Change] | None:
        """The changes that gain most together; None when none gains."""
        best, found = LEAST_GAIN, None
        for changes in self._exchanges(step_units):
            gain = sum(self._gain(change) for change in changes)
            if gain > best and self._fits(changes):
                best, found = gain, changes
        return found

    def apply(self, changes: list[Change]) -> None:
        """Make these changes."""
        for index, change in changes:
            self.counts_NK[index] += np.array(change)
            self.free_K -= np.array(change) * self.size_N[index]
            self._worths[index] = self._worth(index, self.counts_NK[index])
        touched = {index for index, _ in changes}
        self._gains = {change: gain for change, gain in self._gains.items() if change[0] not in touched}

    def _exchanges(self, step_units: int) -> Iterator[list[Change]]:
        """One policy alone, and one that gains what another one gives."""
        alone = {index: list(self._own_changes(index, step_units)) for index in range(len(self.readings))}
        for changes in alone.values():
            yield from ([change] for change in changes)
        for taker, giver in itertools.permutations(alone, 2):
            for taken in alone[taker]:
                needed = [max(0, more * int(self.size_N[taker])) for more in taken[1]]
                if max(needed):
                    yield from ([taken, given] for given in self._gifts(giver, needed))

    def _own_changes(self, index: int, step_units: int) -> Iterator[Change]:
        """More or fewer replicas of one type, or the same number on another type."""
        count = max(1, step_units // int(self.size_N[index]))
        types = range(len(self.capacity_units))
        for kind in types:
            yield index, tuple(count if other == kind else 0 for other in types)
            if self.counts_NK[index, kind] >= count:
                yield index, tuple(-count if other == kind else 0 for other in types)
        for old, new in itertools.permutations(types, 2):
            if self.counts_NK[index, old] >= count:
                yield index, tuple(count if other == new else -count if other == old else 0 for other in types)

    def _gifts(self, giver: int, needed_units: list[int]) -> Iterator[Change]:
        """Ways in which a policy makes room: it gives replicas up, or moves them to another type."""
        kind = int(np.argmax(needed_units))
        short = needed_units[kind] - int(self.free_K[kind])
        size = int(self.size_N[giver])
        count = -(-short // size)
        if count < 1 or self.counts_NK[giver, kind] < count:
            return
        types = range(len(self.capacity_units))
        yield giver, tuple(-count if other == kind else 0 for other in types)
        for new in types:
            if new != kind:
                yield giver, tuple(-count if other == kind else count if other == new else 0 for other in types)

    def _fits(self, changes: list[Change]) -> bool:
        used_K = sum(np.array(change) * self.size_N[index] for index, change in changes)
        return bool((used_K <= self.free_K).all())

    def _gain(self, change: Change) -> float:
        if change not in self._gains:
            index, more = change
            self._gains[change] = self._worth(index, self.counts_NK[index] + np.array(more)) - self._worths[index]
        return self._gains[change]

    def _worth(self, index: int, counts_K: NDArray[np.int64]) -> float:
        return float(self.worth(self.readings[index], counts_K[None, :])[0])
