"""Floors (least shares) on several types of units: which policies can keep them, and which compete for too few."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mrl.allocation.objective import Reading
from mrl.allocation.replica_placement import ReplicaPlacement, competing, runs_on
from mrl.config.rules.unit_rules import KINDS, fitting_units
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError


class JointFloors(NamedTuple):
    """Floors that all hold at once."""

    replicas: dict[str, int]
    """Policy -> replicas of its floor."""
    taking_turns: frozenset[str]
    """Policies that lack room for even one replica each. Their floors are 0."""


def check_floors(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError where units are leased, and the floors of all policies do not hold on them at once."""
    for device, kind in KINDS.items():
        is_leased = bool(config.allocation.units)
        rivals = [name for name in config.learning if is_leased and config.policies[name].device == device]
        fitting = {name: fitting_units(config, name) for name in rivals}
        floor_units = config.allocation.floor_units
        if short := _short_of_floors(fitting, floor_units):
            have = len(frozenset().union(*(fitting[name] for name in short)))
            most = next(floor for floor in range(have // len(short), -1, -1) if not _short_of_floors(fitting, floor))
            raise ConfigError(
                f"allocation.floor_units: too few {kind} units for the floors of all policies",
                where=where,
                got=f"{floor_units} * {len(short)} policies > {have} units",
                wanted=f"floor_units <= {most}",
                cure="" if most else "set allocation.floor_units = 0, so that policies take turns",
            )


def _short_of_floors(fitting: Mapping[str, frozenset[str]], floor_units: int) -> list[str]:
    """Return the policies whose floors do not all hold on the units that each of them fits."""
    alike = Counter(
        frozenset(name for name in fitting if unit in fitting[name]) for unit in frozenset().union(*fitting.values())
    )
    fits_NK = [[name in some for some in alike] for name in fitting]
    found = competing([floor_units] * len(fitting), [1] * len(fitting), fits_NK, list(alike.values()))
    return [name for index, name in enumerate(fitting) if index in found]


def floors_that_hold(readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> JointFloors:
    """Return the floors, lowered for policies that compete for too few units: to one replica, or to none in turns.

    Policies that do not compete keep their floors. Silent policies have none.
    """
    live = [one for one in readings if not one.silent]
    floors = {one.policy: 0 if one.silent else one.floor_replicas for one in readings}
    # Lowered by one replica at a time, since a smaller floor of one policy may end the competition of others.
    while rivals := competing_policies(live, floors, capacity_units):
        floors = {policy: floor - (policy in rivals) for policy, floor in floors.items()}
    turns = competing_policies(live, dict.fromkeys(floors, 1), capacity_units)
    return JointFloors({policy: 0 if policy in turns else floor for policy, floor in floors.items()}, turns)


def competing_policies(
    readings: Sequence[Reading], floors: Mapping[str, int], capacity_units: tuple[int, ...]
) -> frozenset[str]:
    """Return the policies that compete for too few units to have these floors (replicas per policy)."""
    wanted = [floors[one.policy] for one in readings]
    found = competing(wanted, *_sizes_and_types(readings, capacity_units), capacity_units)
    return frozenset(readings[index].policy for index in found)


def keeps_floor(reading: Reading, counts: Sequence[int]) -> bool:
    """Whether this share, by type, keeps the policy's floor. Silent and unmeasured policies have none."""
    serving = sum(count for kind, count in enumerate(counts) if runs_on(reading, kind))
    return reading.silent or reading.progress_per_replica is None or serving >= reading.floor_replicas


def shares_at_floors(readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return replicas per policy and type, each policy at its floor; where not all fit, the smallest floors come first.

    A policy takes the types on which it has replicas, then the types on which it is fast.
    """
    all_policies = set(range(len(readings)))
    if (seats := _seated(all_policies, readings, capacity_units)) is None:
        kept: set[int] = set()
        for index in sorted(all_policies, key=lambda index: readings[index].floor_replicas * _size(readings[index])):
            if _seated(kept | {index}, readings, capacity_units):
                kept |= {index}
        seats = _seated(kept, readings, capacity_units)
    return [tuple(row) for row in seats.counts_NK] if seats else []


def _seated(chosen: set[int], readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> ReplicaPlacement | None:
    """Return seats in which the chosen policies have their floors; None where that is impossible."""
    seats = ReplicaPlacement(*_sizes_and_types(readings, capacity_units), capacity_units)
    for index in sorted(chosen, key=lambda index: -_size(readings[index])):
        one = readings[index]
        speeds = one.progress_per_replica or (1.0,) * len(capacity_units)
        kinds = sorted(range(len(capacity_units)), key=lambda kind: (not one.replicas[kind], -speeds[kind]))
        floor = 0 if one.silent else one.floor_replicas
        if seats.add(index, floor, kinds) < floor:
            return None
    return seats


def _size(reading: Reading) -> int:
    return reading.units_per_replica


def _sizes_and_types(
    readings: Sequence[Reading], capacity_units: tuple[int, ...]
) -> tuple[list[int], list[list[bool]]]:
    types = range(len(capacity_units))
    return [_size(one) for one in readings], [[runs_on(one, kind) for kind in types] for one in readings]
