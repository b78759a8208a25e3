"""The measurement: rates of one policy from the totals that its workers and its learner report.

Estimates decay by evidence (busy seconds), never by wall time: a policy that stands still keeps its estimate.
"""

import math
from dataclasses import dataclass, field

WINDOW_S = 60.0
MIN_ROLLOUT_S = 0.5
MIN_LEARNER_S = 1.0
MIN_SILENCE_S = 60.0
SILENT_INTERVALS = 10.0


@dataclass
class DecayedRatio:
    """A ratio of two increments, each decayed by the evidence that came after it."""

    numerator: float = 0.0
    denominator: float = 0.0
    evidence_s: float = 0.0

    def add(self, numerator: float, denominator: float, evidence_s: float) -> None:
        """Count increments that took `evidence_s` of busy time."""
        keep = math.exp(-evidence_s / WINDOW_S)
        self.numerator = self.numerator * keep + numerator
        self.denominator = self.denominator * keep + denominator
        self.evidence_s = self.evidence_s * keep + evidence_s

    def value(self, min_evidence_s: float) -> float | None:
        """The ratio; None while there is too little evidence."""
        if self.evidence_s < min_evidence_s or self.denominator <= 0.0:
            return None
        return self.numerator / self.denominator


@dataclass
class PolicyMeter:
    """What is known about one policy."""

    rollout: DecayedRatio = field(default_factory=DecayedRatio)
    """Generated tokens per slot-second."""
    learner: DecayedRatio = field(default_factory=DecayedRatio)
    """Trained tokens per busy second."""
    busy: DecayedRatio = field(default_factory=DecayedRatio)
    """Busy seconds per second that the learner was busy or waited for data."""
    num_reports: int = 0
    _learner_totals: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _reported_s: float = -math.inf
    _interval_s: float = 0.0

    def add_rollout(self, tokens: float, slot_seconds: float, slots: int) -> None:
        """Count what a worker generated since its last request, while it held `slots`."""
        if tokens >= 0.0 and slot_seconds > 0.0:
            self.rollout.add(tokens, slot_seconds, slot_seconds / max(1, slots))

    def add_report(self, trained_tokens: float, busy_s: float, data_wait_s: float, now_s: float) -> None:
        """Count a learner's totals; totals that went backwards are those of a restarted learner."""
        totals = (trained_tokens, busy_s, data_wait_s)
        tokens, busy, wait = increments(totals, self._learner_totals)
        self._learner_totals = totals
        if self.num_reports:
            interval_s = now_s - self._reported_s
            self._interval_s = interval_s if self.num_reports == 1 else 0.9 * self._interval_s + 0.1 * interval_s
        self._reported_s = now_s
        self.num_reports += 1
        if busy > 0.0:
            self.learner.add(tokens, busy, busy)
            self.busy.add(busy, busy + wait, busy)

    def is_silent(self, now_s: float) -> bool:
        """Whether the learner reported before and then stopped: hung, or done with its steps."""
        bound_s = max(MIN_SILENCE_S, SILENT_INTERVALS * self._interval_s)
        return self.num_reports > 0 and now_s - self._reported_s > bound_s

    def demand_slots(self, now_s: float) -> float | None:
        """Slots that just keep the learner busy: its tokens per second over those of one slot. None while unknown."""
        if self.is_silent(now_s):
            return 0.0
        trained, generated = self.learner.value(MIN_LEARNER_S), self.rollout.value(MIN_ROLLOUT_S)
        return trained / generated if trained and generated else None

    def progress(self) -> float:
        """Busy share of the learner, 0 while unknown."""
        return self.busy.value(MIN_LEARNER_S) or 0.0


def increments(new: tuple[float, ...], old: tuple[float, ...]) -> tuple[float, ...]:
    """What came on top of `old`; a total that went backwards started again at zero."""
    if any(a < b for a, b in zip(new, old, strict=True)):
        return new
    return tuple(a - b for a, b in zip(new, old, strict=True))
