"""Splits in proportion: whole slots by demand, and whole replicas by weight."""

import math
from collections.abc import Mapping, Sequence

from mrl.allocation.worth import Reading

MAX_DEMAND_SLOTS = 1e9


def fair_shares(demands: Mapping[str, float], *, slots: int, floor_slots: int) -> dict[str, int]:
    """Whole slots per policy, summing to `slots`.

    Maximises the least progress a_i / d_i under a_i >= floor: a_i = max(floor, theta d_i), with theta such that the
    shares sum to the slots. All slots are handed out, also those beyond the demand. The floor is lowered to an equal
    split where the slots do not reach for it. A demand of 0 gets the floor; if all are 0 the split is equal.
    """
    if not demands:
        return {}
    floor = min(floor_slots, slots // len(demands))
    wanted = {name: min(max(demand, 0.0), MAX_DEMAND_SLOTS) for name, demand in demands.items()}
    if not any(wanted.values()):
        wanted = dict.fromkeys(demands, 1.0)
    return _in_whole_slots(_fluid(wanted, slots, floor), slots)


def progress_gain(demands: Mapping[str, float], new: Mapping[str, int], old: Mapping[str, int]) -> float:
    """Relative gain of the least progress min(1, a_i / d_i) when shares go from `old` to `new`."""
    before, after = _least_progress(demands, old), _least_progress(demands, new)
    if before <= 0.0:
        return math.inf if after > 0.0 else 0.0
    return after / before - 1.0


def split_evenly(slots: int, parts: int) -> list[int]:
    """`slots` in `parts` whole shares that differ by at most one, larger ones first."""
    small, larger = divmod(slots, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def _fluid(demands: Mapping[str, float], slots: int, floor: int) -> dict[str, float]:
    """Real shares: policies that theta would leave under the floor are pinned to it until none is left under it."""
    free = {name for name, demand in demands.items() if demand > 0.0}
    while True:
        rest = slots - floor * (len(demands) - len(free))
        total = sum(demands[name] for name in free)
        low = {name for name in free if rest * demands[name] / total < floor}
        if not low:
            return {name: rest * demands[name] / total if name in free else float(floor) for name in demands}
        free -= low
        if not free:
            return dict.fromkeys(demands, float(floor))


def _in_whole_slots(shares: Mapping[str, float], slots: int) -> dict[str, int]:
    """Largest remainders first; ties by name."""
    whole = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (whole[name] - shares[name], name))
    for name in by_remainder[: slots - sum(whole.values())]:
        whole[name] += 1
    return whole


def _least_progress(demands: Mapping[str, float], shares: Mapping[str, int]) -> float:
    return min((min(1.0, shares.get(name, 0) / demand) for name, demand in demands.items() if demand > 0), default=1.0)


def proportional_split(
    readings: Sequence[Reading], capacity_units: tuple[int, ...], *, by_weight: bool
) -> dict[str, tuple[int, ...]]:
    """Replicas per policy and unit type, in proportion to the weights or, without `by_weight`, equally many units each.

    Every policy that is not silent has its floor, as far as the units reach, in the order of `readings`; what is left
    goes by largest remainder, as long as a whole replica fits.
    """
    counts: dict[str, list[int]] = {reading.policy: [] for reading in readings}
    for kind, units in enumerate(capacity_units):
        fitting = [one for one in readings if not one.silent and _runs_on(one, kind)]
        weights = {one.policy: one.weight if by_weight else 1.0 for one in fitting}
        floors = {one.policy: max(0, one.floor_replicas - sum(counts[one.policy])) for one in fitting}
        found = _whole_replicas(fitting, weights, floors, units)
        for policy, row in counts.items():
            row.append(found.get(policy, 0))
    return {policy: tuple(row) for policy, row in counts.items()}


def _runs_on(reading: Reading, kind: int) -> bool:
    return reading.progress_per_replica is None or reading.progress_per_replica[kind] > 0.0


def _whole_replicas(
    readings: Sequence[Reading], weights: Mapping[str, float], floors: Mapping[str, int], units: int
) -> dict[str, int]:
    """One pool: floors first, then replica by replica to whoever is furthest below its quota."""
    counts, left = dict.fromkeys(weights, 0), units
    total = sum(weights.values())
    size = {reading.policy: reading.units_per_replica for reading in readings}
    for policy in counts:
        counts[policy] = min(floors[policy], left // size[policy])
        left -= counts[policy] * size[policy]
    quota = {policy: units * weights[policy] / total / size[policy] for policy in counts} if total > 0.0 else {}
    while fitting := [policy for policy in quota if size[policy] <= left and weights[policy] > 0.0]:
        # Nobody takes a replica beyond its quota while another one's whole replica is missing.
        policy = max(fitting, key=lambda name: (quota[name] - counts[name], name))
        counts[policy] += 1
        left -= size[policy]
    return counts
