"""The measurement: supply, demand and silence of one policy, from increments of counters of engines and learner.

Estimates decay by evidence (seconds that engine or learner were busy), never by wall time: a policy that stands still
keeps its estimate.
"""

import math
from dataclasses import dataclass, field

from mrl.allocation.latency_line import LatencyLine

MIN_YIELD = 0.3


@dataclass(frozen=True, slots=True)
class MeterSettings:
    """How fast estimates follow, and when a learner counts as silent."""

    time_constant_s: float = 600.0
    """Memory of rates, in busy seconds."""
    yield_constant_s: float = 1800.0
    """Memory of the share of groups that were trained on, in busy seconds."""
    min_busy_s: float = 20.0
    """Least evidence of a learner's rate, in busy seconds."""
    min_interval_s: float = 1.0
    """What happened in a shorter time is counted with what follows."""
    doubtful_s: float = 60.0
    """A learner not heard of for this long says nothing about its progress."""
    silent_s: float = 120.0
    """A learner not heard of for longer hangs; learners are heard of while they train and while they wait."""


@dataclass
class DecayedRatio:
    """A ratio of two increments, each decayed by the evidence that came after it."""

    numerator: float = 0.0
    denominator: float = 0.0
    evidence_s: float = 0.0

    def add(self, numerator: float, denominator: float, evidence_s: float, time_constant_s: float) -> None:
        """Count increments that took `evidence_s` of busy time."""
        keep = math.exp(-evidence_s / time_constant_s)
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

    settings: MeterSettings = field(default_factory=MeterSettings)
    line: LatencyLine = field(default_factory=LatencyLine)
    learner: DecayedRatio = field(default_factory=DecayedRatio)
    """Trained tokens per busy second."""
    groups: DecayedRatio = field(default_factory=DecayedRatio)
    """Groups trained on per group trained on or dropped as stale."""
    busy: DecayedRatio = field(default_factory=DecayedRatio)
    """Busy seconds per second that the learner was busy or waited for data."""
    rollout: DecayedRatio = field(default_factory=DecayedRatio)
    """Generated tokens per request-second."""
    full_requests: float | None = None
    """Requests that a replica runs when it is full (C); None: unknown, or the units are requests themselves."""
    supply_progress: float | None = None
    """Share of the learner that the engines fed in the last interval; None when that cannot be told."""
    heard_s: float | None = None
    """Time of the learner's last sign of life."""
    _generated_tokens: float = 0.0

    def add_generated(self, tokens: float, request_s: float, *, evidence_s: float) -> None:
        """Count what engines generated in `request_s` request-seconds, `evidence_s` seconds of one busy engine."""
        self._generated_tokens += tokens
        if request_s > 0.0:
            self.rollout.add(tokens, request_s, evidence_s, self.settings.time_constant_s)

    def add_engine(
        self, active_s: float, request_s: float, tokens: float, *, interval_s: float, running: float, is_full: bool,
        num_engines: int = 1,
    ) -> None:  # fmt: skip
        """Count what one replica or worker did within `interval_s`.

        active_s: time with a request running; request_s: integral of running requests over time; running: requests
        now; is_full: others wait, so `running` is all that fits.
        """
        self.add_generated(tokens, request_s, evidence_s=active_s / max(1, num_engines))
        if running > 0 and (is_full or running > (self.full_requests or 0.0)):
            self.full_requests = float(running)
        self.add_sample(active_s, request_s, tokens, interval_s=interval_s, num_engines=num_engines)

    def add_sample(
        self, active_s: float, request_s: float, tokens: float, *, interval_s: float, num_engines: int = 1
    ) -> None:
        """Count one point of the latency line: what one of `num_engines` did within `interval_s`, as in `add_engine`.

        Not while it mostly had nothing to do: such an interval is full of beginnings and ends.
        """
        if active_s > interval_s / 2 and tokens > 0.0:
            keep = math.exp(-active_s / max(1, num_engines) / self.settings.time_constant_s)
            self.line.add(request_s / active_s, request_s / tokens, keep)

    def add_learner(
        self, tokens: float, busy_s: float, data_wait_s: float, trained_groups: float, dropped_groups: float
    ) -> None:
        """Count what the learner did since the last call."""
        rate_s, yield_s = self.settings.time_constant_s, self.settings.yield_constant_s
        if busy_s > 0.0 or dropped_groups > 0.0:
            self.groups.add(trained_groups, trained_groups + dropped_groups, busy_s, yield_s)
        if busy_s > 0.0:
            self.learner.add(tokens, busy_s, busy_s, rate_s)
            self.busy.add(busy_s, busy_s + data_wait_s, busy_s, rate_s)

    def hear(self, now_s: float) -> None:
        """Note a sign of life of the learner."""
        self.heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether the learner was heard of and then no more: it hangs, or is done with its steps."""
        return self.heard_s is not None and now_s - self.heard_s > self.settings.silent_s

    def end_interval(
        self, interval_s: float, now_s: float, *, num_engines: int, delivered_tokens: float | None = None
    ) -> bool:
        """Turn what was generated in these seconds into `supply_progress`; False when they are too few to tell.

        delivered_tokens: tokens of the groups that were completed, where that is known; better than what was
        generated, since it leaves out what only fills the engines when answers grow longer. Groups come in lumps, so
        that a single interval may hold more than the learner takes.
        """
        doubtful = self.heard_s is not None and now_s - self.heard_s >= self.settings.doubtful_s
        trained = self.learner.value(self.settings.min_busy_s)
        if num_engines == 0:
            self.supply_progress = 0.0
        elif not trained or doubtful:
            self.supply_progress = None
        elif interval_s >= self.settings.min_interval_s:
            needed = trained * interval_s / self.trained_share()
            generated = min(1.0, self._generated_tokens / needed)
            self.supply_progress = generated if delivered_tokens is None else delivered_tokens / needed
        else:
            return False
        self._generated_tokens = 0.0
        return True

    def trained_share(self) -> float:
        """Share of the generated groups that are trained on (y), at least MIN_YIELD."""
        measured = self.groups.value(0.0)
        return max(MIN_YIELD, 1.0 if measured is None else measured)

    def demand_requests(self) -> float | None:
        """Requests in flight that just keep the learner busy (Little's law): kappa / y times seconds per token.

        In full replicas where it is known what fits into one, else as engines were run of late. None while unknown.
        """
        trained, generated = self.learner.value(self.settings.min_busy_s), self.rollout.value(0.0)
        if not trained or not generated:
            return None
        full = None if self.full_requests is None else self.line.seconds_per_token(self.full_requests)
        return trained * (full or 1.0 / generated) / self.trained_share()

    def demand_units(self, units_per_replica: int) -> float | None:
        """Units that just keep the learner busy: d = kappa / (R y). None while unknown."""
        requests = self.demand_requests()
        if requests is None or self.full_requests is None:
            return None
        return requests * units_per_replica / self.full_requests

    def progress(self) -> float:
        """Busy share of the learner, 0 while unknown."""
        return self.busy.value(0.0) or 0.0


def increments(new: tuple[float, ...], old: tuple[float, ...]) -> tuple[float, ...]:
    """What came on top of `old`; a total that went backwards started again at zero."""
    if any(a < b for a, b in zip(new, old, strict=True)):
        return new
    return tuple(a - b for a, b in zip(new, old, strict=True))
