"""The decision: state and readings in, new shares and the record of the decision out.

The decision is pure, and the same in the allocator and in the simulator. Its inputs and outputs can be written down, so
that a run's decisions can be replayed.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from mrl.allocation.allocation_limits import START_PROGRESS
from mrl.allocation.floors import competing_policies, floors_that_hold
from mrl.allocation.objective import Reading, Rule, share_worth
from mrl.allocation.proportional import fair_parts, is_unmeasured, proportional_split, units_left, with_units_left
from mrl.allocation.solver import FloatArray, best_split
from mrl.allocation.typed_split import Counts, Worth, best_typed_split

Shares = dict[str, tuple[int, ...]]
"""Replicas per policy and unit type."""

Verdict = Literal["moved", "best already", "demand unknown", "gain too small", "dwell"]


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a controller between two decisions."""

    decided_s: float
    moved_s: float | None = None
    """Time of the last move."""
    progress: dict[str, float] = {}
    """Policy -> supply progress over the rule's window."""
    unserved_s: dict[str, float] = {}
    """Policy without units -> time since which it has none."""
    unknown_since_s: float | None = None
    """Time since which the demand of some policy is unknown; None when all demands are known."""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, with the readings that it was made from."""

    urgent: bool
    """Whether dwell and least gain did not apply."""
    readings: tuple[Reading, ...]
    progress: dict[str, float]
    candidate: Shares
    """The best shares that were found."""
    shares: Shares
    """Shares after the decision: the candidate, or the shares of before."""
    gain: float | None
    """Relative gain in worth of the candidate. None where it has no measure, or where the shares of before broke a
    floor or the capacity."""
    verdict: Verdict
    """Whether the decision moves to the candidate, and if not, why."""

    @property
    def why(self) -> str:
        """The reason of a move, in words."""
        if self.urgent:
            return "who takes part has changed"
        return "the split before was not allowed" if self.gain is None else "a better split"


def decide(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    capacity_units: tuple[int, ...],
    now_s: float,
    *,
    urgent: bool = False,
) -> tuple[ControllerState, DecisionRecord]:
    """Decide the shares of all policies of one pool (deficit-weighted receding horizon, exact solver).

    urgent: a unit or an engine came or went, or a learner fell silent or came back. Dwell and least gain do not apply
    to such a decision.
    """
    state = _observed(rule, state, readings, now_s)
    return Decision(rule, state, readings, capacity_units, now_s, urgent=urgent).conclude()


def _observed(rule: Rule, state: ControllerState, readings: Sequence[Reading], now_s: float) -> ControllerState:
    """Return the state with time and progress taken into account. The progress of a silent policy stands still."""
    elapsed_s = max(0.0, now_s - state.decided_s)
    keep = math.exp(-elapsed_s / rule.window_s)
    progress = {}
    for reading in readings:
        before = state.progress.get(reading.policy, START_PROGRESS)
        fed = None if reading.silent else reading.supply_progress
        progress[reading.policy] = before if fed is None else fed + keep * (before - fed)
    unserved_s = {
        reading.policy: state.unserved_s.get(reading.policy, now_s)
        for reading in readings
        if not any(reading.replicas) and not reading.silent
    }
    since_s = now_s if state.unknown_since_s is None else state.unknown_since_s
    return msgspec.structs.replace(
        state,
        decided_s=now_s,
        progress=progress,
        unserved_s=unserved_s,
        unknown_since_s=since_s if any(map(is_unmeasured, readings)) else None,
    )


class Decision:
    """One decision about one pool: the best split, and whether to move to it.

    `readings` come with the floors of the configuration, and get the floors that hold together at this moment.
    """

    def __init__(
        self,
        rule: Rule,
        state: ControllerState,
        readings: Sequence[Reading],
        capacity_units: tuple[int, ...],
        now_s: float,
        *,
        urgent: bool,
    ) -> None:
        """`state`: with this moment's progress and time taken into account."""
        self._rule, self._state, self._capacity_units = rule, state, capacity_units
        self._now_s, self._urgent = now_s, urgent
        self._has_dwelt = state.moved_s is None or now_s - state.moved_s >= rule.dwell_s
        self._floors = floors_that_hold(readings, capacity_units)
        self._readings = self._with_due_floors(readings)
        self._known = [one for one in self._readings if one.progress_per_replica is not None and not one.silent]
        self._before: Shares = {one.policy: one.replicas for one in self._readings}
        self._fits = _fits(self._readings, self._before, capacity_units)
        """Whether the shares of before keep all floors and the capacity."""

    def conclude(self) -> tuple[ControllerState, DecisionRecord]:
        """Return the state after the decision, and its record."""
        candidate, gain, verdict = self._choose()
        has_moved = verdict == "moved"
        state = msgspec.structs.replace(self._state, moved_s=self._now_s) if has_moved else self._state
        record = DecisionRecord(
            urgent=self._urgent,
            readings=tuple(self._readings),
            progress=state.progress,
            candidate=candidate,
            shares=candidate if has_moved else self._before,
            gain=gain,
            verdict=verdict,
        )
        return state, record

    def _choose(self) -> tuple[Shares, float | None, Verdict]:
        """Return the candidate, its gain, and the verdict."""
        has_unmeasured = self._rule.objective != "static" and any(map(is_unmeasured, self._readings))
        has_unmeasured = has_unmeasured and not self._floors.taking_turns
        # A demand is usually known soon. Until then the equal split stays, rather than to move and to move back.
        if has_unmeasured and self._fits and not self._urgent and not self._has_waited():
            return self._before, 0.0, "demand unknown"
        is_apart = has_unmeasured and bool(self._known)
        if is_apart:
            candidate, gain = self._best_beside_the_unmeasured()
        else:
            candidate, gain = self._best(self._readings, self._capacity_units, fits=self._fits)
        gain = gain if self._fits else None
        verdict = self._judge(candidate, gain)
        # Free units go to the unmeasured policies also where the measured policies stay as they are.
        if is_apart and verdict != "moved":
            fuller = with_units_left(self._before, self._readings, self._capacity_units)
            if fuller != self._before:
                return fuller, gain, "moved"
        return candidate, gain, verdict

    def _has_waited(self) -> bool:
        """Whether policies with a known demand have waited a dwell for the demands of the others."""
        since_s = self._state.unknown_since_s
        has_waited = since_s is not None and self._state.decided_s - since_s >= self._rule.dwell_s
        return bool(self._known) and has_waited

    # Floors.

    def _with_due_floors(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return the readings with the floors that hold.

        A policy that takes turns gets a floor when it was unserved for too long, and keeps the units of its turn for a
        dwell before the next policy's turn.
        """
        floors, live = dict(self._floors.replicas), [one for one in readings if not one.silent]
        for policy, since_s in sorted(self._state.unserved_s.items(), key=lambda item: item[1]):
            is_late = self._now_s - since_s > self._rule.max_unserved_s
            is_due = self._has_dwelt and is_late and policy in self._floors.taking_turns
            if is_due and not competing_policies(live, floors | {policy: 1}, self._capacity_units):
                floors[policy] = 1
        return [_with_floor(reading, floors[reading.policy]) for reading in readings]

    # The best split.

    def _best(
        self, readings: Sequence[Reading], capacity_units: tuple[int, ...], *, fits: bool
    ) -> tuple[Shares, float | None]:
        """Return the best shares of these policies, and their gain over the shares of before.

        The gain is None where it has no measure.
        fits: whether the shares of before keep the floors of these policies and this capacity.
        """
        if self._rule.objective == "static":
            return proportional_split(readings, capacity_units, by_weight=True), None
        if not self._known:  # no demand speaks for taking from one policy for another
            kept = [_with_floor(one, max(one.floor_replicas, sum(one.replicas) * fits)) for one in readings]
            return proportional_split(kept, capacity_units, by_weight=False), None
        filled, worth = _with_guesses(readings), self._worth(readings)
        if len(capacity_units) == 1:
            units = [one.units_per_replica for one in filled]
            values = [worth(one, np.arange(capacity_units[0] // one.units_per_replica + 1)[:, None]) for one in filled]
            found: list[tuple[int, ...]] = [(count,) for count in best_split(values, units, capacity_units[0])]
        else:
            found = best_typed_split(filled, worth, capacity_units, [one.replicas for one in filled] if fits else None)
        shares = {one.policy: counts for one, counts in zip(filled, found, strict=True)}
        old = sum(float(worth(one, np.array([one.replicas]))[0]) for one in filled)
        new = sum(float(worth(one, np.array([shares[one.policy]]))[0]) for one in filled)
        return shares, (new - old) / abs(old) if old else 0.0

    def _worth(self, readings: Sequence[Reading]) -> Worth:
        """Return a function for the worth of candidate shares of one policy, beside the progress of these policies."""
        progress, is_weighted = self._state.progress, self._rule.objective == "weighted"
        reference = min(
            progress[one.policy] / (one.weight if is_weighted else 1.0) for one in readings if not one.silent
        )

        def worth(reading: Reading, counts_NK: Counts) -> FloatArray:
            own = progress[reading.policy]
            return share_worth(reading, counts_NK, self._rule, progress=own, reference=reference)

        return worth

    def _best_beside_the_unmeasured(self) -> tuple[Shares, float | None]:
        """Return fair parts for unmeasured policies, and `_best` of the rest for the others; deal out what is left."""
        kept = fair_parts(self._readings, self._capacity_units)
        rest = units_left(self._capacity_units, self._readings, kept)
        others = [one for one in self._readings if one.policy not in kept]
        shares, gain = self._best(others, rest, fits=self._fits and _fits(others, self._before, rest))
        found = with_units_left(kept | shares, self._readings, self._capacity_units)
        return {policy: found[policy] for policy in self._before}, gain

    # The verdict.

    def _judge(self, candidate: Shares, gain: float | None) -> Verdict:
        if candidate == self._before:
            return "best already"
        if self._urgent or not self._fits:
            return "moved"
        if gain is not None and gain < self._rule.min_gain:
            return "gain too small"
        # Free units make no policy wait for a switch, so that the dwell protects nothing.
        if not self._taken_units(candidate):
            return "moved"
        return "moved" if self._has_dwelt else "dwell"

    def _taken_units(self, candidate: Shares) -> int:
        """Return the units that the candidate takes from one policy for another; a free unit costs nobody anything."""
        held = sum(sum(one.replicas) * one.units_per_replica for one in self._readings)
        started = sum(
            one.units_per_replica * max(0, new - old)
            for one in self._readings
            for new, old in zip(candidate[one.policy], one.replicas, strict=True)
        )
        return max(0, started - max(0, sum(self._capacity_units) - held))


def _with_floor(reading: Reading, replicas: int) -> Reading:
    return msgspec.structs.replace(reading, floor_replicas=replicas)


def _fits(readings: Sequence[Reading], shares: Shares, capacity_units: tuple[int, ...]) -> bool:
    """Whether these shares keep the floor of every policy and the capacity of every type."""
    used = np.zeros(len(capacity_units))
    for reading in readings:
        used += np.array(shares[reading.policy]) * reading.units_per_replica
        if sum(shares[reading.policy]) < reading.floor_replicas:
            return False
    return bool((used <= np.array(capacity_units)).all())


def _with_guesses(readings: Sequence[Reading]) -> list[Reading]:
    """Return readings in which an unmeasured policy has the mean demand of the measured policies, on every type."""
    known = [one for one in readings if one.progress_per_replica is not None and not one.silent]
    means = [_mean_demand(known, kind) for kind in range(len(readings[0].replicas))]
    return [
        reading
        if reading.progress_per_replica is not None
        else msgspec.structs.replace(reading, progress_per_replica=_guessed(reading, means))
        for reading in readings
    ]


def _guessed(reading: Reading, means: Sequence[float]) -> tuple[float, ...]:
    unfit = reading.unfit or (False,) * len(means)
    pairs = zip(means, unfit, strict=True)
    return tuple(0.0 if is_unfit or not mean else reading.units_per_replica / mean for mean, is_unfit in pairs)


def _mean_demand(known: Sequence[Reading], kind: int) -> float:
    """Return the mean demand in units of one type; 0 where none of these policies runs there, 1 without policies."""
    pairs = [(one.units_per_replica, one.progress_per_replica[kind]) for one in known if one.progress_per_replica]
    demands = [units / progress for units, progress in pairs if progress > 0.0]
    return sum(demands) / len(demands) if demands else 0.0 if pairs else 1.0
