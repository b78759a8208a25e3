"""The controller's one function: state and readings in, new shares and the record of the decision out.

Pure, and the same in the allocator and in the simulator; all that goes in and comes out can be written down, so that a
run's decisions can be replayed.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from mrl.allocation.exchange_search import best_typed_split
from mrl.allocation.floors import HeldFloors, competing_policies, floors_that_hold
from mrl.allocation.shares import proportional_split
from mrl.allocation.solver import best_split
from mrl.allocation.type_trial import trial_shares
from mrl.allocation.unmeasured import fair_parts, is_unmeasured, rest_of, with_rest
from mrl.allocation.worth import Reading, Rule, share_worth

Shares = dict[str, tuple[int, ...]]
"""Replicas per policy and unit type."""

Verdict = Literal["moved", "trial", "best already", "demand unknown", "gain too small", "dwell", "bucket empty"]
"""A trial is a move that is made to measure a policy on a type of unit."""
START_PROGRESS = 0.5
MOVES_PER_TRIAL = 2
"""Where trials and better splits compete for the dwell."""


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller remembers from one decision to the next."""

    decided_s: float
    moved_s: float | None = None
    """Time of the last move."""
    bucket_units: float | None = None
    """Unit moves left; None before the first decision, and where moves are free."""
    progress: dict[str, float] = {}
    """Windowed supply progress of every policy."""
    unserved_s: dict[str, float] = {}
    """Time at which a policy without units lost its last one."""
    unknown_since_s: float | None = None
    """Since when there is a policy whose demand is unknown; None when there is none."""
    moves_since_trial: int = 0


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision with all that led to it."""

    now_s: float
    rule: Rule
    urgent: bool
    capacity_units: tuple[int, ...]
    readings: tuple[Reading, ...]
    progress: dict[str, float]
    candidate: Shares
    shares: Shares
    """What holds from now on: the candidate, or what was there."""
    gain: float | None
    """Relative gain in worth of the candidate; None where what was there broke a floor or the capacity."""
    moved_units: int
    """Units that the candidate starts."""
    bucket_units: float | None
    """Unit moves left after the decision; None where moves are free."""
    verdict: Verdict
    """Whether the candidate was taken, and if not, why."""

    @property
    def why(self) -> str:
        """What a move was made for, in words."""
        if self.verdict == "trial":
            return "to measure a type of unit"
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
    """Decide the shares of all policies (reference: deficit-weighted receding horizon, exact solver).

    `urgent`: a unit or an engine came or went, or a learner fell silent or came back; dwell, bucket and least gain do
    not apply.
    """
    state = _observe(rule, state, readings, sum(capacity_units), now_s)
    held = floors_that_hold(readings, capacity_units)
    aged = _with_aged_floors(rule, state, readings, held, capacity_units, now_s)
    before = {reading.policy: reading.replicas for reading in aged}
    fits = _fits(aged, before, capacity_units)
    known = [reading for reading in aged if reading.progress_per_replica is not None and not reading.silent]
    has_unmeasured = rule.objective != "static" and any(map(is_unmeasured, aged)) and not held.taking_turns
    forced = urgent or not fits
    gain: float | None
    verdict: Verdict
    if has_unmeasured and fits and not urgent and not _has_waited(rule, state, known):
        candidate, gain, verdict = before, 0.0, "demand unknown"
    else:
        around = has_unmeasured and bool(known)
        find = _candidate_around if around else _candidate
        candidate, gain = find(rule, state, aged, before, capacity_units, is_measured=bool(known), fits=fits)
        gain = gain if fits else None
        verdict = _judge(rule, state, aged, candidate, gain, capacity_units, now_s, forced=forced)
        if around and verdict != "moved" and (fuller := with_rest(before, aged, capacity_units)) != before:
            candidate, verdict = fuller, "moved"
        if not urgent and fits and _may_try(rule, state, verdict, now_s):
            tried = trial_shares(aged, capacity_units)
            candidate, gain, verdict = (tried, 0.0, "trial") if tried else (candidate, gain, verdict)
    if verdict in ("moved", "trial"):
        state = _paid(state, _taken_units(aged, candidate, capacity_units), forced=forced)
    return _conclude(rule, state, aged, candidate, gain, verdict, capacity_units, now_s, urgent=urgent)


def _has_waited(rule: Rule, state: ControllerState, known: Sequence[Reading]) -> bool:
    """Whether those whose demands are known have waited for the others for long enough."""
    since_s = state.unknown_since_s
    return bool(known) and since_s is not None and state.decided_s - since_s >= rule.dwell_s


def _may_try(rule: Rule, state: ControllerState, verdict: Verdict, now_s: float) -> bool:
    """Whether a move may be spent on measuring: when no better split is to be made, or now and then instead of it."""
    has_dwelt = state.moved_s is None or now_s - state.moved_s >= rule.dwell_s
    has_moves = state.bucket_units is None or state.bucket_units > 0.0
    is_turn = verdict in ("best already", "gain too small") or state.moves_since_trial >= MOVES_PER_TRIAL
    return rule.objective != "static" and has_dwelt and has_moves and is_turn


def _observe(
    rule: Rule, state: ControllerState, readings: Sequence[Reading], capacity: int, now_s: float
) -> ControllerState:
    """Take progress and time into account. A silent policy's progress stands still."""
    elapsed_s = max(0.0, now_s - state.decided_s)
    keep = math.exp(-elapsed_s / rule.window_s)
    progress = {}
    for reading in readings:
        before = state.progress.get(reading.policy, START_PROGRESS)
        fed = None if reading.silent else reading.supply_progress
        progress[reading.policy] = before if fed is None else fed + keep * (before - fed)
    bucket = state.bucket_units
    if rule.moves_per_unit_hour is not None:
        most = rule.moves_per_unit_hour * capacity
        bucket = most if bucket is None else min(most, bucket + most * elapsed_s / 3600.0)
    unserved_s = {
        reading.policy: state.unserved_s.get(reading.policy, now_s)
        for reading in readings
        if not any(reading.replicas) and not reading.silent
    }
    since_s = now_s if state.unknown_since_s is None else state.unknown_since_s
    return msgspec.structs.replace(
        state,
        decided_s=now_s,
        bucket_units=bucket,
        progress=progress,
        unserved_s=unserved_s,
        unknown_since_s=since_s if any(map(is_unmeasured, readings)) else None,
    )


def _with_aged_floors(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    held: HeldFloors,
    capacity_units: tuple[int, ...],
    now_s: float,
) -> list[Reading]:
    """Floors as they hold now: of those who take turns, only for who was unserved for too long.

    Whoever got units in such a way keeps them for a dwell before the next one's turn.
    """
    floors, live = dict(held.replicas), [one for one in readings if not one.silent]
    may_move = state.moved_s is None or now_s - state.moved_s >= rule.dwell_s
    for policy, since_s in sorted(state.unserved_s.items(), key=lambda item: item[1]):
        is_due = policy in held.taking_turns and now_s - since_s > rule.max_unserved_s
        if may_move and is_due and not competing_policies(live, floors | {policy: 1}, capacity_units):
            floors[policy] = 1
    return [_with_floor(reading, floors[reading.policy]) for reading in readings]


def _with_floor(reading: Reading, replicas: int) -> Reading:
    return msgspec.structs.replace(reading, floor_replicas=replicas)


def _fits(readings: Sequence[Reading], shares: Shares, capacity_units: tuple[int, ...]) -> bool:
    used = np.zeros(len(capacity_units))
    for reading in readings:
        used += np.array(shares[reading.policy]) * reading.units_per_replica
        if sum(shares[reading.policy]) < reading.floor_replicas:
            return False
    return bool((used <= np.array(capacity_units)).all())


def _candidate(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    before: Shares,
    capacity_units: tuple[int, ...],
    *,
    is_measured: bool,
    fits: bool,
) -> tuple[Shares, float | None]:
    """The best shares, and by how much they beat those of before; None where that cannot be told."""
    if rule.objective == "static":
        return proportional_split(readings, capacity_units, by_weight=True), None
    if not is_measured:  # nothing speaks for taking from one and giving to another, where what was there fits
        kept = [_with_floor(one, max(one.floor_replicas, sum(one.replicas) * fits)) for one in readings]
        return proportional_split(kept, capacity_units, by_weight=False), None
    filled = _with_guesses(readings)
    live = [reading for reading in filled if not reading.silent]
    weights = {reading.policy: reading.weight if rule.objective == "weighted" else 1.0 for reading in live}
    reference = min(state.progress[policy] / weight for policy, weight in weights.items())

    def worth(reading: Reading, counts_NK: np.ndarray) -> np.ndarray:
        return share_worth(reading, counts_NK, rule, progress=state.progress[reading.policy], reference=reference)

    if len(capacity_units) == 1:
        units = [reading.units_per_replica for reading in filled]
        values = [worth(one, np.arange(capacity_units[0] // one.units_per_replica + 1)[:, None]) for one in filled]
        found: list[tuple[int, ...]] = [(count,) for count in best_split(values, units, capacity_units[0])]
    else:
        now = list(before.values()) if fits else None
        found = best_typed_split(filled, worth, capacity_units, now)
    shares = dict(zip(before, found, strict=True))
    old, new = (
        sum(float(worth(one, np.array([split[one.policy]]))[0]) for one in filled) for split in (before, shares)
    )
    return shares, (new - old) / abs(old) if old else 0.0


def _candidate_around(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    before: Shares,
    capacity_units: tuple[int, ...],
    *,
    is_measured: bool,
    fits: bool,
) -> tuple[Shares, float | None]:
    """`_candidate` of the measured policies with what the others leave, who get what is left over then."""
    kept = fair_parts(readings, capacity_units)
    rest = rest_of(capacity_units, readings, kept)
    others = [reading for reading in readings if reading.policy not in kept]
    had = {reading.policy: before[reading.policy] for reading in others}
    fits = fits and _fits(others, had, rest)
    shares, gain = _candidate(rule, state, others, had, rest, is_measured=is_measured, fits=fits)
    found = with_rest(kept | shares, readings, capacity_units)
    return {policy: found[policy] for policy in before}, gain


def _with_guesses(readings: Sequence[Reading]) -> list[Reading]:
    """An unmeasured policy is taken for one with the mean demand of the measured, on every type."""
    known = [one for one in readings if one.progress_per_replica is not None and not one.silent]
    num_types = len(readings[0].replicas)
    means = [_mean_demand(known, kind) for kind in range(num_types)]
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
    """Units of one type that these policies need in the mean; 1 while nobody is known, 0 where none of them can run."""
    pairs = [(one.units_per_replica, one.progress_per_replica[kind]) for one in known if one.progress_per_replica]
    demands = [units / progress for units, progress in pairs if progress > 0.0]
    return sum(demands) / len(demands) if demands else 0.0 if pairs else 1.0


def _started_units(readings: Sequence[Reading], candidate: Shares) -> int:
    return sum(
        reading.units_per_replica * max(0, new - old)
        for reading in readings
        for new, old in zip(candidate[reading.policy], reading.replicas, strict=True)
    )


def _taken_units(readings: Sequence[Reading], candidate: Shares, capacity_units: tuple[int, ...]) -> int:
    """Units that the candidate takes from one policy for another; those that are free cost nobody anything."""
    held = sum(sum(reading.replicas) * reading.units_per_replica for reading in readings)
    return max(0, _started_units(readings, candidate) - max(0, sum(capacity_units) - held))


def _paid(state: ControllerState, taken_units: int, *, forced: bool) -> ControllerState:
    """After a move. It may cost more than is left, so that the next one waits longer; one that had to be does not."""
    if state.bucket_units is None:
        return state
    left = state.bucket_units - taken_units
    return msgspec.structs.replace(state, bucket_units=max(left, min(0.0, state.bucket_units)) if forced else left)


def _judge(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    candidate: Shares,
    gain: float | None,
    capacity_units: tuple[int, ...],
    now_s: float,
    *,
    forced: bool,
) -> Verdict:
    if all(candidate[reading.policy] == reading.replicas for reading in readings):
        return "best already"
    if forced:
        return "moved"
    if gain is not None and gain < rule.min_gain:
        return "gain too small"
    if not _taken_units(readings, candidate, capacity_units):
        return "moved"
    if state.moved_s is not None and now_s - state.moved_s < rule.dwell_s:
        return "dwell"
    return "moved" if state.bucket_units is None or state.bucket_units > 0.0 else "bucket empty"


def _conclude(
    rule: Rule,
    state: ControllerState,
    readings: Sequence[Reading],
    candidate: Shares,
    gain: float | None,
    verdict: Verdict,
    capacity_units: tuple[int, ...],
    now_s: float,
    *,
    urgent: bool,
) -> tuple[ControllerState, DecisionRecord]:
    moved, shares = _started_units(readings, candidate), {reading.policy: reading.replicas for reading in readings}
    if verdict in ("moved", "trial"):
        shares = candidate
        count = state.moves_since_trial + 1 if verdict == "moved" else 0
        state = msgspec.structs.replace(state, moved_s=now_s, moves_since_trial=count)
    record = DecisionRecord(
        now_s=now_s,
        rule=rule,
        urgent=urgent,
        capacity_units=capacity_units,
        readings=tuple(readings),
        progress=state.progress,
        candidate=candidate,
        shares=shares,
        gain=gain,
        moved_units=moved,
        bucket_units=state.bucket_units,
        verdict=verdict,
    )
    return state, record
