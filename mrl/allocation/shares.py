"""Splits in proportion: whole replicas by weight, and slots over the workers of one policy."""

import math
from collections.abc import Sequence

from mrl.allocation.floors import runs_on
from mrl.allocation.worth import Reading
from mrl.config.unit_seats import UnitSeats


def split_evenly(slots: int, parts: int) -> list[int]:
    """`slots` in `parts` whole shares that differ by at most one, larger ones first."""
    small, larger = divmod(slots, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def proportional_split(
    readings: Sequence[Reading], capacity_units: tuple[int, ...], *, by_weight: bool
) -> dict[str, tuple[int, ...]]:
    """Replicas per policy and unit type, in proportion to the weights or, without `by_weight`, equally many units each.

    Each type is shared by those that run on it; a policy's quota is the sum of its parts. Every policy that is not
    silent has its floor, as far as the units reach, in the order of `readings`; what is left goes by largest remainder,
    as long as a whole replica fits. For who fits few types others move over to types that they fit too.
    """
    live = [reading for reading in readings if not reading.silent]
    seats = _ProportionalSeats(live, capacity_units, [one.weight if by_weight else 1.0 for one in live])
    seats.add_floors()
    seats.add_remainders()
    return {one.policy: (0,) * len(capacity_units) for one in readings} | seats.shares()


class _ProportionalSeats:
    def __init__(self, readings: Sequence[Reading], capacity_units: tuple[int, ...], weights: Sequence[float]) -> None:
        types = range(len(capacity_units))
        fits_NK = [[runs_on(one, kind) for kind in types] for one in readings]
        total_K = [sum(weight for weight, row in zip(weights, fits_NK, strict=True) if row[kind]) for kind in types]
        self._readings = readings
        self._seats = UnitSeats([one.units_per_replica for one in readings], fits_NK, capacity_units)
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
                if not self._add_one(index):
                    break

    def add_remainders(self) -> None:
        """Replica by replica to whoever is furthest below its quota.

        Nobody takes a replica beyond its quota while another one's whole replica is missing.
        """
        missing = {index: self._missing(index) for index, quota_K in enumerate(self._quota_NK) if any(quota_K)}
        while missing:
            index = max(missing, key=missing.__getitem__)
            if self._add_one(index):
                missing[index] = self._missing(index)
            else:
                del missing[index]

    def shares(self) -> dict[str, tuple[int, ...]]:
        return {one.policy: tuple(row) for one, row in zip(self._readings, self._seats.counts_NK, strict=True)}

    def _missing(self, index: int) -> tuple[float, str]:
        """Replicas below the quota; of equals the last name comes first."""
        return sum(self._quota_NK[index]) - sum(self._seats.counts_NK[index]), self._readings[index].policy

    def _add_one(self, index: int) -> bool:
        """On a type where the policy has a replica that is not counted yet, or else where its quota is filled least."""
        here_K, count_K, quota_K = self._readings[index].replicas, self._seats.counts_NK[index], self._quota_NK[index]
        filled_K = [count / quota if quota else math.inf for count, quota in zip(count_K, quota_K, strict=True)]
        kinds = sorted(range(len(quota_K)), key=lambda kind: (count_K[kind] >= here_K[kind], filled_K[kind]))
        return bool(self._seats.add(index, 1, kinds))
