"""Moves that measure: one replica of a policy goes to a type of unit on which the policy was never seen.

What is only foreseen may be wrong, and a policy that is thought to be slow somewhere would never be sent there to show
otherwise. A trial takes nothing from anybody's number of replicas: it uses a free unit, or two policies swap.
"""

from collections.abc import Iterator, Sequence

from mrl.allocation.worth import Reading

Trial = dict[str, tuple[int, ...]]
"""Replicas per policy and type of unit."""


def trial_shares(readings: Sequence[Reading], capacity_units: tuple[int, ...]) -> Trial | None:
    """The shares in which one more pair of policy and type is tried; None when all that can be tried was.

    First whoever has most replicas, to whom one that is being moved matters least. It gives one of the type of which it
    has most; in a swap, to the policy that loses least by it.
    """
    live = [reading for reading in readings if not reading.silent and reading.progress_per_replica is not None]
    for reading in sorted(live, key=lambda one: -sum(one.replicas)):
        for kind in range(len(capacity_units)):
            if kind in _being_tried(reading) or not _is_untried(reading, kind):
                continue
            for giver in _ways(reading, kind, live, readings, capacity_units):
                return _swapped(readings, reading, giver, kind)
    return None


def _being_tried(reading: Reading) -> set[int]:
    return {kind for kind, count in enumerate(reading.replicas) if count}


def _is_untried(reading: Reading, kind: int) -> bool:
    return bool(reading.untried) and reading.untried[kind]


def _own_type(reading: Reading) -> int:
    return max(range(len(reading.replicas)), key=lambda kind: reading.replicas[kind])


def _ways(
    reading: Reading, kind: int, live: Sequence[Reading], readings: Sequence[Reading], capacity_units: tuple[int, ...]
) -> Iterator[Reading | None]:
    """None for a free unit, else those who can swap, best first."""
    if not any(reading.replicas):
        return
    used = sum(one.replicas[kind] * one.units_per_replica for one in readings)
    if used + reading.units_per_replica <= capacity_units[kind]:
        yield None
    own = _own_type(reading)
    partners = [
        one
        for one in live
        if one is not reading
        and one.replicas[kind]
        and one.units_per_replica == reading.units_per_replica
        and (one.progress_per_replica or ())[own] > 0.0
    ]
    yield from sorted(partners, key=lambda one: -_kept(one, kind, own))


def _kept(reading: Reading, old: int, new: int) -> float:
    """Of its progress, what a policy keeps that gives one replica of a type for one of another."""
    per_replica = reading.progress_per_replica or ()
    now = sum(count * speed for count, speed in zip(reading.replicas, per_replica, strict=True))
    return (now - per_replica[old] + per_replica[new]) / now if now > 0.0 else 1.0


def _swapped(readings: Sequence[Reading], taker: Reading, giver: Reading | None, kind: int) -> Trial:
    own = _own_type(taker)
    change = {taker.policy: 1} | ({giver.policy: -1} if giver else {})
    return {
        one.policy: tuple(
            count + change.get(one.policy, 0) * ((other == kind) - (other == own))
            for other, count in enumerate(one.replicas)
        )
        for one in readings
    }
