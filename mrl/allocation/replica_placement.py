"""Replicas on types of units that not every policy fits: whether one more has room, if need be after others move.

With replicas of one size the search is exact (maximum bipartite matching by augmenting paths). With several sizes
larger replicas have to be seated first, and room that only a rearrangement of many replicas would make is not found.
"""

from collections.abc import Sequence

from mrl.allocation.objective import Reading


def runs_on(reading: Reading, kind: int) -> bool:
    """Whether an engine of the policy fits a type of unit, and generates anything there."""
    fits = not (reading.unfit and reading.unfit[kind])
    return fits and (reading.progress_per_replica is None or reading.progress_per_replica[kind] > 0.0)


class ReplicaPlacement:
    """Replicas per policy and type, none at first."""

    def __init__(
        self, units_per_replica: Sequence[int], fits_NK: Sequence[Sequence[bool]], capacity_units: Sequence[int]
    ) -> None:
        """units_per_replica: units of one replica of every policy. fits_NK: whether a policy runs on a type."""
        self.counts_NK = [[0] * len(capacity_units) for _ in fits_NK]
        """Replicas per policy and type."""
        self._size_N, self._free_K = units_per_replica, list(capacity_units)
        self._fits_NK = [
            [fits and size <= units for fits, units in zip(row, capacity_units, strict=True)]
            for size, row in zip(units_per_replica, fits_NK, strict=True)
        ]

    def add(self, policy: int, replicas: int, kinds: Sequence[int] | None = None) -> int:
        """Seat up to this many more replicas of a policy; return how many found room.

        kinds: the order of types in which free units are taken. Other policies move only where free units do not reach.
        """
        order, missing = range(len(self._free_K)) if kinds is None else kinds, replicas
        for kind in order:
            missing -= self._add_free(policy, missing, kind)
        while missing and any(self._make_room(kind, self._size_N[policy], set()) for kind in self._fitting(policy)):
            for kind in order:
                missing -= self._add_free(policy, missing, kind)
        return replicas - missing

    def rivals(self, policy: int) -> set[int]:
        """Return the policy, and every policy whose loss of a replica could make room for one more replica of it.

        Rivals sit on the types that the policy fits, or on types to which such rivals could move, and so on.
        """
        found, kinds = {policy}, set(self._fitting(policy))
        while joining := {
            other for other, row in enumerate(self.counts_NK) if other not in found and any(row[kind] for kind in kinds)
        }:
            found |= joining
            kinds |= {kind for other in joining for kind in self._fitting(other)}
        return found

    def _add_free(self, policy: int, replicas: int, kind: int) -> int:
        """Seat up to this many replicas on the free units of one type; return how many."""
        found = min(replicas, self._free_K[kind] // self._size_N[policy]) if self._fits_NK[policy][kind] else 0
        self._put(policy, kind, found)
        return found

    def _fitting(self, policy: int) -> list[int]:
        return [kind for kind, fits in enumerate(self._fits_NK[policy]) if fits]

    def _put(self, policy: int, kind: int, replicas: int) -> None:
        self.counts_NK[policy][kind] += replicas
        self._free_K[kind] -= replicas * self._size_N[policy]

    def _make_room(self, kind: int, units: int, tried: set[int]) -> bool:
        """Move replicas to other types until `units` of a type are free, and return whether they are.

        Each type is cleared at most once.
        """
        if self._free_K[kind] >= units:
            return True
        if kind in tried:
            return False
        tried.add(kind)
        for policy, row in enumerate(self.counts_NK):
            for other in self._fitting(policy):
                while row[kind] and other != kind and self._make_room(other, self._size_N[policy], tried):
                    self._put(policy, kind, -1)
                    self._put(policy, other, 1)
                    if self._free_K[kind] >= units:
                        return True
        return False


def competing(
    replicas: Sequence[int],
    units_per_replica: Sequence[int],
    fits_NK: Sequence[Sequence[bool]],
    capacity_units: Sequence[int],
) -> set[int]:
    """Return the policies that compete for too few units when each is to have its replicas; empty where all have room.

    A policy that does not compete can have all of its replicas, however the competing policies share theirs.
    """
    seats = ReplicaPlacement(units_per_replica, fits_NK, capacity_units)
    by_size = sorted(range(len(replicas)), key=lambda policy: -units_per_replica[policy])
    short = [policy for policy in by_size if seats.add(policy, replicas[policy]) < replicas[policy]]
    return set().union(*(seats.rivals(policy) for policy in short))
