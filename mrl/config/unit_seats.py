"""Replicas on types of units that not every policy fits: whether one more has room, if need be after others move over.

The rules of a configuration ask it whether all floors can hold, and the controller asks again whenever units or
policies come and go. With replicas of one size it is exact (maximum bipartite matching by augmenting paths); with
several sizes, larger ones are to be seated first, and room that only a rearrangement of many would make is not found.
"""

from collections.abc import Sequence


class UnitSeats:
    """Replicas per policy and type, none at first."""

    def __init__(
        self, units_per_replica: Sequence[int], fits_NK: Sequence[Sequence[bool]], capacity_units: Sequence[int]
    ) -> None:
        """`units_per_replica`: of every policy; `fits_NK`: whether it runs on a type."""
        self.counts_NK = [[0] * len(capacity_units) for _ in fits_NK]
        """Replicas per policy and type."""
        self._size_N, self._free_K = units_per_replica, list(capacity_units)
        self._fits_NK = [
            [fits and size <= units for fits, units in zip(row, capacity_units, strict=True)]
            for size, row in zip(units_per_replica, fits_NK, strict=True)
        ]

    def add(self, policy: int, replicas: int, kinds: Sequence[int] | None = None) -> int:
        """Seat so many replicas more, or as many as can be; how many that is.

        kinds: types in the order in which free units are taken; only where those do not reach, others move over.
        """
        order, missing = range(len(self._free_K)) if kinds is None else kinds, replicas
        for kind in order:
            missing -= self.add_free(policy, missing, kind)
        while missing and any(self._make_room(kind, self._size_N[policy], set()) for kind in self._fitting(policy)):
            for kind in order:
                missing -= self.add_free(policy, missing, kind)
        return replicas - missing

    def add_free(self, policy: int, replicas: int, kind: int) -> int:
        """Seat up to so many replicas on the free units of one type; how many that is."""
        found = min(replicas, self._free_K[kind] // self._size_N[policy]) if self._fits_NK[policy][kind] else 0
        self._put(policy, kind, found)
        return found

    def rivals(self, policy: int) -> set[int]:
        """The policy and those of whom one would have to give something up so that it could have one replica more.

        They sit on the types that it fits, or on those to which these could move, and so on.
        """
        found, kinds = {policy}, set(self._fitting(policy))
        while joining := {
            other for other, row in enumerate(self.counts_NK) if other not in found and any(row[kind] for kind in kinds)
        }:
            found |= joining
            kinds |= {kind for other in joining for kind in self._fitting(other)}
        return found

    def _fitting(self, policy: int) -> list[int]:
        return [kind for kind, fits in enumerate(self._fits_NK[policy]) if fits]

    def _put(self, policy: int, kind: int, replicas: int) -> None:
        self.counts_NK[policy][kind] += replicas
        self._free_K[kind] -= replicas * self._size_N[policy]

    def _make_room(self, kind: int, units: int, tried: set[int]) -> bool:
        """Have replicas move to other types until so many units of one are free; each type is cleared at most once."""
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
    """Policies of which somebody goes short when each is to have so many replicas; nobody where there is room for all.

    Who is not among them can have all of its replicas whatever these do.
    """
    seats = UnitSeats(units_per_replica, fits_NK, capacity_units)
    by_size = sorted(range(len(replicas)), key=lambda policy: -units_per_replica[policy])
    short = [policy for policy in by_size if seats.add(policy, replicas[policy]) < replicas[policy]]
    return set().union(*(seats.rivals(policy) for policy in short))
