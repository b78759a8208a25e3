"""Splits without a demand: whole replicas in proportion, fair parts for unmeasured policies, slots over workers.

An unmeasured policy is one whose demand is unknown. Beside measured policies it has a fair part of the units, and what
these leave; the measured policies share the rest by its worth. So no policy waits for a demand that is long in coming,
and no unit stands idle while an unmeasured policy may need it.
"""

import math
from collections.abc import Mapping, Sequence

from mrl.allocation.objective import Reading
from mrl.allocation.replica_placement import ReplicaPlacement, runs_on

TypeCounts = tuple[int, ...]
"""Replicas, or units, of every type."""


def split_evenly(slots: int, parts: int) -> list[int]:
    """Split `slots` into `parts` whole shares that differ by at most one, larger shares first."""
    small, larger = divmod(slots, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def proportional_split(
    readings: Sequence[Reading], capacity_units: TypeCounts, *, by_weight: bool
) -> dict[str, TypeCounts]:
    """Return replicas per policy and type: units in proportion to the weights, or equal units without `by_weight`.

    Each type is shared by the policies that run on it; the quota of a policy is the sum of its parts. Every policy that
    is not silent has its floor, as far as the units reach, in the order of `readings`. The rest goes by largest
    remainder, as long as a whole replica fits. For a policy that fits few types, others move to types that they fit
    too.
    """
    live = [reading for reading in readings if not reading.silent]
    seats = _ProportionalSeats(live, capacity_units, [one.weight if by_weight else 1.0 for one in live])
    seats.add_floors()
    seats.add_remainders()
    return {one.policy: (0,) * len(capacity_units) for one in readings} | seats.shares()


class _ProportionalSeats:
    def __init__(self, readings: Sequence[Reading], capacity_units: TypeCounts, weights: Sequence[float]) -> None:
        types = range(len(capacity_units))
        fits_NK = [[runs_on(one, kind) for kind in types] for one in readings]
        total_K = [sum(weight for weight, row in zip(weights, fits_NK, strict=True) if row[kind]) for kind in types]
        self._readings = readings
        self._seats = ReplicaPlacement([one.units_per_replica for one in readings], fits_NK, capacity_units)
        self._quota_NK = [
            [
                capacity_units[kind] * weight / total_K[kind] / one.units_per_replica if row[kind] and weight else 0.0
                for kind in types
            ]
            for one, weight, row in zip(readings, weights, fits_NK, strict=True)
        ]

    def add_floors(self) -> None:
        for index, one in enumerate(self._readings):
            for _ in range(one.floor_replicas):
                if not self._add_replica(index):
                    break

    def add_remainders(self) -> None:
        """Give replica by replica to the policy that is furthest below its quota.

        No policy takes a replica beyond its quota while another policy misses a whole replica.
        """
        missing = {index: self._missing(index) for index, quota_K in enumerate(self._quota_NK) if any(quota_K)}
        while missing:
            index = max(missing, key=missing.__getitem__)
            if self._add_replica(index):
                missing[index] = self._missing(index)
            else:
                del missing[index]

    def shares(self) -> dict[str, TypeCounts]:
        return {one.policy: tuple(row) for one, row in zip(self._readings, self._seats.counts_NK, strict=True)}

    def _missing(self, index: int) -> tuple[float, str]:
        """Return the replicas that the policy is below its quota, and its name: of equals the last name comes first."""
        return sum(self._quota_NK[index]) - sum(self._seats.counts_NK[index]), self._readings[index].policy

    def _add_replica(self, index: int) -> bool:
        """Add a replica where the policy has one that is not counted yet, else where its quota is filled least."""
        here_K, count_K, quota_K = self._readings[index].replicas, self._seats.counts_NK[index], self._quota_NK[index]
        filled_K = [count / quota if quota else math.inf for count, quota in zip(count_K, quota_K, strict=True)]
        kinds = sorted(range(len(quota_K)), key=lambda kind: (count_K[kind] >= here_K[kind], filled_K[kind]))
        return bool(self._seats.add(index, 1, kinds))


def is_unmeasured(reading: Reading) -> bool:
    """Whether the policy could use units, and its demand is unknown."""
    return reading.progress_per_replica is None and not reading.silent


def fair_parts(readings: Sequence[Reading], capacity_units: TypeCounts) -> dict[str, TypeCounts]:
    """Return the replicas that every unmeasured policy keeps: at most its part of an equal split of the units.

    A policy below its floor, such as one that has just come, gets that part.
    """
    equal = proportional_split(readings, capacity_units, by_weight=False)
    # Replicas stay on their types: a unit that only moved for fairness would cost a switch.
    free, kept = list(capacity_units), {}
    for reading in filter(is_unmeasured, readings):
        left, counts = sum(equal[reading.policy]), []
        is_new = sum(reading.replicas) < reading.floor_replicas
        for kind, count in enumerate(equal[reading.policy] if is_new else reading.replicas):
            counts.append(min(count, left, free[kind] // reading.units_per_replica))
            left -= counts[-1]
            free[kind] -= counts[-1] * reading.units_per_replica
        kept[reading.policy] = tuple(counts)
    return kept


def units_left(capacity_units: TypeCounts, readings: Sequence[Reading], shares: Mapping[str, TypeCounts]) -> TypeCounts:
    """Return the units of every type that these shares leave."""
    used = [
        sum(shares[one.policy][kind] * one.units_per_replica for one in readings if one.policy in shares)
        for kind in range(len(capacity_units))
    ]
    return tuple(units - taken for units, taken in zip(capacity_units, used, strict=True))


def with_units_left(
    shares: Mapping[str, TypeCounts], readings: Sequence[Reading], capacity_units: TypeCounts
) -> dict[str, TypeCounts]:
    """Return the shares, with the units that they leave dealt out to the unmeasured policies.

    Each replica goes to the policy with the fewest units, on the type with the most free units.
    """
    dealt = {policy: list(counts) for policy, counts in shares.items()}
    free = list(units_left(capacity_units, readings, shares))
    takers = [reading for reading in readings if is_unmeasured(reading)]

    def free_types(reading: Reading) -> list[int]:
        unfit = reading.unfit or (False,) * len(free)
        return [kind for kind, units in enumerate(free) if units >= reading.units_per_replica and not unfit[kind]]

    while able := [reading for reading in takers if free_types(reading)]:
        taker = min(able, key=lambda one: sum(dealt[one.policy]) * one.units_per_replica)
        kind = max(free_types(taker), key=lambda found: free[found])
        dealt[taker.policy][kind] += 1
        free[kind] -= taker.units_per_replica
    return {policy: tuple(counts) for policy, counts in dealt.items()}
