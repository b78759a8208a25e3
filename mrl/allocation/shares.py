"""Splits in proportion: whole replicas by weight, and slots over the workers of one policy."""

from collections.abc import Mapping, Sequence

from mrl.allocation.worth import Reading


def split_evenly(slots: int, parts: int) -> list[int]:
    """`slots` in `parts` whole shares that differ by at most one, larger ones first."""
    small, larger = divmod(slots, parts)
    return [small + 1] * larger + [small] * (parts - larger)


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
    fits = not (reading.unfit and reading.unfit[kind])
    return fits and (reading.progress_per_replica is None or reading.progress_per_replica[kind] > 0.0)


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
