"""Placement of replicas on units: fewest moves, gangs in aligned blocks, a whole gang or nothing."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

RUNNING_COST = 0.001
RELOCATION_COST = 10.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica on the units [first_unit, first_unit + num_units)."""

    policy: str
    first_unit: int
    num_units: int
    running: int = 0
    """Requests that it runs: of two replicas that could be stopped, the one with fewer is."""

    @property
    def units(self) -> range:
        """Units on which the replica runs."""
        return range(self.first_unit, self.first_unit + self.num_units)


@dataclass(frozen=True, slots=True)
class Moves:
    """Changes of a placement: `stopped` frees units, then `started` takes some; their units may overlap."""

    stopped: tuple[Placed, ...]
    started: tuple[Placed, ...]
    unplaced: tuple[str, ...] = ()
    """Policies of replicas for which there was no block, one entry each."""


def place(
    placed: Sequence[Placed],
    wanted: Mapping[str, int],
    replica_units: Mapping[str, int],
    *,
    num_units: int,
    down: frozenset[int] = frozenset(),
) -> Moves:
    """Return the moves that give every policy its `wanted` replicas, largest gangs first.

    A block starts at a multiple of its size. Displacing a replica that has to go anyway is cheap; a gang may also
    displace a smaller replica that is still wanted, which then moves. `placed` must not touch units that are down.
    """
    board = _Board(placed, wanted, num_units, down)
    for policy in sorted(wanted, key=lambda name: (-replica_units[name], name)):
        board.start_missing(policy, replica_units[policy])
    board.drop_surplus()
    return Moves(tuple(board.stopped), tuple(board.started), tuple(board.unplaced))


class _Board:
    """Owners of the units while moves are chosen."""

    def __init__(
        self, placed: Sequence[Placed], wanted: Mapping[str, int], num_units: int, down: frozenset[int]
    ) -> None:
        have = Counter(replica.policy for replica in placed)
        self.missing = {policy: max(0, count - have[policy]) for policy, count in wanted.items()}
        self._surplus = {policy: max(0, have[policy] - wanted.get(policy, 0)) for policy in have}
        self._owner: dict[int, Placed] = {unit: replica for replica in placed for unit in replica.units}
        self._num_units, self._down = num_units, down
        self.stopped: list[Placed] = []
        self.started: list[Placed] = []
        self.unplaced: list[str] = []

    def start_missing(self, policy: str, size: int) -> None:
        """Take the cheapest block for each missing replica, or note that there is none.

        Blocks lie in a heap by the cost that they had when they were last looked at. The cost of a block grows once its
        owner has no surplus replicas left, which is noticed when the block comes up; it falls only where a replica is
        stopped.
        """
        heap: list[tuple[float, int]] = []
        if self.missing[policy] > 0:
            self._offer(heap, policy, range(0, self._num_units - size + 1, size), size)
        while self.missing[policy] > 0:
            self.missing[policy] -= 1
            first = self._cheapest(heap, policy, size)
            if first is None:
                self.unplaced.append(policy)
                continue
            stopped = self._inside(first, size)
            for replica in stopped:
                self._stop(replica)
            replica = Placed(policy, first, size)
            self.started.append(replica)
            self._owner.update(dict.fromkeys(replica.units, replica))
            freed = {unit - unit % size for one in stopped for unit in one.units}
            self._offer(heap, policy, freed, size)

    def _offer(self, heap: list[tuple[float, int]], policy: str, blocks: Iterable[int], size: int) -> None:
        for first in blocks:
            cost = self._cost(policy, first, size)
            if cost is not None and first + size <= self._num_units:
                heapq.heappush(heap, (cost, first))

    def _cheapest(self, heap: list[tuple[float, int]], policy: str, size: int) -> int | None:
        """Take the cheapest block off the heap, the first of several; return None when there is none."""
        while heap:
            cost, first = heapq.heappop(heap)
            now = self._cost(policy, first, size)
            if now == cost:
                return first
            if now is not None:
                heapq.heappush(heap, (now, first))
        return None

    def drop_surplus(self) -> None:
        """Stop surplus replicas whose units nobody took over, the least loaded first."""
        for policy, count in self._surplus.items():
            own = {replica for replica in self._owner.values() if replica.policy == policy}
            for replica in sorted(own, key=lambda one: (one.running, one.first_unit))[:count]:
                self._stop(replica)

    def _inside(self, first: int, size: int) -> list[Placed]:
        """Replicas on the units of a block, each once."""
        return list(dict.fromkeys(self._owner[unit] for unit in range(first, first + size) if unit in self._owner))

    def _cost(self, policy: str, first: int, size: int) -> float | None:
        """Cost of taking a block; None where it must not be taken."""
        block = range(first, first + size)
        if self._down.intersection(block):
            return None
        cost, going = 0.0, Counter[str]()
        for replica in self._inside(first, size):
            if replica.policy == policy:
                return None
            going[replica.policy] += 1
            if going[replica.policy] <= self._surplus.get(replica.policy, 0):
                cost += 1.0 + RUNNING_COST * replica.running
            elif replica.num_units < size:
                cost += RELOCATION_COST
            else:
                return None
        return cost

    def _stop(self, replica: Placed) -> None:
        self.stopped.append(replica)
        for unit in replica.units:
            del self._owner[unit]
        if self._surplus.get(replica.policy, 0) > 0:
            self._surplus[replica.policy] -= 1
        else:
            self.missing[replica.policy] += 1
