"""Least shares on several types of units: who can keep them, and who competes where they do not all fit."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mrl.allocation.worth import Reading
from mrl.config.unit_seats import UnitSeats, competing


class HeldFloors(NamedTuple):
    """Floors of which all hold at once."""

    replicas: dict[str, int]
    """By policy."""
    taking_turns: frozenset[str]
    """Policies of which not even one replica each has room; their floors are none."""


def runs_on(reading: Reading, kind: int) -> bool:
    """Whether an engine of the policy fits a type of unit, and makes anything there."""
    fits = not (reading.unfit and reading.unfit[kind])
    return fits and (reading.progress_per_replica is None or reading.progress_per_replica[kind] > 0.0)


def floors_that_hold(readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> HeldFloors:
    """The floors, lowered for those policies that compete for too few units: to one replica, or to none in turns.

    A policy fits its own types only: others may have all they need meanwhile. Silent policies have no floor.
    """
    live = [one for one in readings if not one.silent]
    floors = {one.policy: 0 if one.silent else one.floor_replicas for one in readings}
    while rivals := competing_policies(live, floors, capacity_units):
        floors = {policy: floor - (policy in rivals) for policy, floor in floors.items()}
    turns = competing_policies(live, dict.fromkeys(floors, 1), capacity_units)
    return HeldFloors({policy: 0 if policy in turns else floor for policy, floor in floors.items()}, turns)


def competing_policies(
    readings: Sequence[Reading], floors: Mapping[str, int], capacity_units: tuple[int, ...]
) -> frozenset[str]:
    """Policies of which somebody goes short of its floor, whatever the split; nobody where all floors can hold.

    floors: replicas per policy.
    """
    wanted = [floors[one.policy] for one in readings]
    found = competing(wanted, *_sizes_and_types(readings, capacity_units), capacity_units)
    return frozenset(readings[index].policy for index in found)


def keeps_floor(reading: Reading, counts: Sequence[int]) -> bool:
    """Whether this share, by type, is no less than the floor; the silent and the unmeasured have none."""
    serving = sum(count for kind, count in enumerate(counts) if runs_on(reading, kind))
    return reading.silent or reading.progress_per_replica is None or serving >= reading.floor_replicas


def shares_at_floors(readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Replicas per policy and type, the floor for each: where not all can hold, for as many as the smallest let in.

    Types are those on which a policy has replicas now, then those on which it is fast.
    """
    everybody = set(range(len(readings)))
    if (seats := _seated(everybody, readings, capacity_units)) is None:
        kept: set[int] = set()
        for index in sorted(everybody, key=lambda index: readings[index].floor_replicas * _size(readings[index])):
            if _seated(kept | {index}, readings, capacity_units):
                kept |= {index}
        seats = _seated(kept, readings, capacity_units)
    return [tuple(row) for row in seats.counts_NK] if seats else []


def _seated(chosen: set[int], readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> UnitSeats | None:
    """Seats in which the chosen have their floors; None where one of them cannot."""
    seats = UnitSeats(*_sizes_and_types(readings, capacity_units), capacity_units)
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
