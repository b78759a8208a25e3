"""Policies that nobody could measure yet, beside others that are: a fair part of what there is, and what is left over.

The measured share the rest by what it is worth to them. So nobody waits for a demand that is long in coming, and no
unit stands idle while somebody may need it.
"""

from collections.abc import Mapping, Sequence

from mrl.allocation.shares import proportional_split
from mrl.allocation.worth import Reading

Counts = tuple[int, ...]
"""Replicas on every type of unit."""


def is_unmeasured(reading: Reading) -> bool:
    """Whether the policy could use units, and nobody knows how many."""
    return reading.progress_per_replica is None and not reading.silent


def fair_parts(readings: Sequence[Reading], capacity_units: Counts) -> dict[str, Counts]:
    """What every unmeasured policy keeps of its replicas: at most its part of an equal split, as far as units are up.

    One that has less than its floor, as when it has just come, gets that part.
    """
    equal = proportional_split(readings, capacity_units, by_weight=False)
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


def rest_of(capacity_units: Counts, readings: Sequence[Reading], shares: Mapping[str, Counts]) -> Counts:
    """Units of every type that these shares leave."""
    used = [
        sum(shares[one.policy][kind] * one.units_per_replica for one in readings if one.policy in shares)
        for kind in range(len(capacity_units))
    ]
    return tuple(units - taken for units, taken in zip(capacity_units, used, strict=True))


def with_rest(shares: Mapping[str, Counts], readings: Sequence[Reading], capacity_units: Counts) -> dict[str, Counts]:
    """The shares, and what they leave dealt to the unmeasured: replica by replica, to whoever has the fewest units."""
    dealt = {policy: list(counts) for policy, counts in shares.items()}
    free = list(rest_of(capacity_units, readings, shares))
    takers = [reading for reading in readings if is_unmeasured(reading)]

    def places(reading: Reading) -> list[int]:
        unfit = reading.unfit or (False,) * len(free)
        return [kind for kind, units in enumerate(free) if units >= reading.units_per_replica and not unfit[kind]]

    while able := [reading for reading in takers if places(reading)]:
        taker = min(able, key=lambda one: sum(dealt[one.policy]) * one.units_per_replica)
        kind = max(places(taker), key=lambda found: free[found])
        dealt[taker.policy][kind] += 1
        free[kind] -= taker.units_per_replica
    return {policy: tuple(counts) for policy, counts in dealt.items()}
