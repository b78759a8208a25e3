"""Which units each replica gets: fewest moves, gangs in aligned blocks, a whole gang or nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Requests that it runs: of two replicas that could go, the one with fewer goes."""

    @property
    def units(self) -> range:
        """Its units."""
        return range(self.first_unit, self.first_unit + self.num_units)


@dataclass(frozen=True, slots=True)
class Moves:
    """What changes: `stopped` frees units, then `started` takes some; their units may overlap."""

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
    """Moves that give every policy its `wanted` replicas, largest gangs first.

    A block starts at a multiple of its size. Displacing a replica that has to go anyway is cheap; a gang may also make
    a smaller replica move that stays wanted. `placed` must not touch units that are down.
    """
    board = _Board(placed, wanted, num_units, down)
    for policy in sorted(wanted, key=lambda name: (-replica_units[name], name)):
        while board.missing[policy] > 0:
            board.missing[policy] -= 1
            board.start(policy, replica_units[policy])
    board.drop_surplus()
    return Moves(tuple(board.stopped), tuple(board.started), tuple(board.unplaced))


class _Board:
    """The units while moves are chosen."""

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

    def start(self, policy: str, size: int) -> None:
        """Take the cheapest block, or note that there is none."""
        blocks = ((self._cost(policy, first, size), first) for first in range(0, self._num_units - size + 1, size))
        cost, first = min(blocks, default=(None, 0), key=lambda block: (block[0] is None, block))
        if cost is None:
            self.unplaced.append(policy)
            return
        for replica in self._inside(first, size):
            self._stop(replica)
        replica = Placed(policy, first, size)
        self.started.append(replica)
        for unit in replica.units:
            self._owner[unit] = replica

    def drop_surplus(self) -> None:
        """Stop the least loaded of the replicas that nobody took over."""
        for policy, count in self._surplus.items():
            own = {replica for replica in self._owner.values() if replica.policy == policy}
            for replica in sorted(own, key=lambda one: (one.running, one.first_unit))[:count]:
                self._stop(replica)

    def _inside(self, first: int, size: int) -> list[Placed]:
        """Replicas that a block touches, each once."""
        return list(dict.fromkeys(self._owner[unit] for unit in range(first, first + size) if unit in self._owner))

    def _cost(self, policy: str, first: int, size: int) -> float | None:
        """What taking a block costs; None where it must not be taken."""
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
