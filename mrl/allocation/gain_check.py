"""The predicted gain of a move against its measured gain.

Both are changes of the least windowed progress over all policies, from the decision until two dwells later:
- predicted: every policy is fed min(1, share / demand), by the demands of the decision and the new shares;
- measured: the windowed progress of the controller at the later time.

A move is not measured where a demand is unknown, where a policy falls silent or comes back, or where another move
comes sooner; nor under objectives that do not raise the least progress.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from mrl.allocation.allocation_limits import DWELLS_PER_GAIN
from mrl.allocation.decision import DecisionRecord


class Gain(NamedTuple):
    """Gains of one move, in progress: shares of a learner that is fed."""

    predicted: float
    measured: float


class GainCheck:
    """Moves that are not measured yet. Pools of policies that do not compete with each other are kept apart."""

    def __init__(self) -> None:
        self._moves: dict[tuple[str, ...], DecisionRecord] = {}
        """The newest unmeasured move, by the policies of its pool."""

    def see(self, record: DecisionRecord) -> Gain | None:
        """Take a decision; returns the gain of an earlier move once, with the first decision after its time."""
        pool = tuple(record.progress)
        moved = self._moves.get(pool)
        gain = None
        if moved and record.now_s - moved.now_s >= DWELLS_PER_GAIN * record.rule.dwell_s:
            del self._moves[pool]
            gain = gain_of(moved, record)
        if record.verdict == "moved":
            self._moves[pool] = record
        return gain


def gain_of(moved: DecisionRecord, later: DecisionRecord) -> Gain | None:
    """Predicted and measured gain from a move until a later decision; None where the move is not measured."""
    live = {reading.policy for reading in moved.readings if not reading.silent}
    if not live or live != {reading.policy for reading in later.readings if not reading.silent}:
        return None
    expected = expected_progress(moved, later.now_s - moved.now_s)
    if moved.rule.objective not in ("max_min", "weighted") or live - expected.keys():
        return None
    before, then, after = (_least(moved, live, progress) for progress in (moved.progress, expected, later.progress))
    return Gain(predicted=then - before, measured=after - before)


def expected_progress(record: DecisionRecord, elapsed_s: float) -> dict[str, float]:
    """Windowed progress after this time under the shares of a decision, for the policies with a known demand."""
    keep, expected = math.exp(-elapsed_s / record.rule.window_s), {}
    for reading in record.readings:
        if reading.progress_per_replica is not None:
            pairs = zip(record.shares[reading.policy], reading.progress_per_replica, strict=True)
            fed = min(1.0, sum(replicas * progress for replicas, progress in pairs))
            expected[reading.policy] = fed + keep * (record.progress[reading.policy] - fed)
    return expected


def _least(record: DecisionRecord, live: set[str], progress: Mapping[str, float]) -> float:
    """Least progress of the live policies; under "weighted" least progress per weight, as in the objective."""
    is_weighted = record.rule.objective == "weighted"
    return min(
        progress[reading.policy] / (reading.weight if is_weighted else 1.0)
        for reading in record.readings
        if reading.policy in live
    )
