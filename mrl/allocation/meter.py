"""The measurement: supply, demand and silence of one policy, from increments of counters of engines and learner.

Engines are measured apart for every type of unit that they run on, the learner once.

Estimates decay by evidence (seconds that engine or learner were busy), never by wall time: a policy that stands still
keeps its estimate.
"""

from dataclasses import dataclass, field

from mrl.allocation.engine_meter import DecayedRatio, EngineMeter

MIN_YIELD = 0.3
ONLY_TYPE = ""
"""The type of all units where types are not told apart."""


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
class PolicyMeter:
    """What is known about one policy."""

    settings: MeterSettings = field(default_factory=MeterSettings)
    engines: dict[str, EngineMeter] = field(default_factory=dict)
    """By type of unit; use `engine`."""
    learner: DecayedRatio = field(default_factory=DecayedRatio)
    """Trained tokens per busy second."""
    groups: DecayedRatio = field(default_factory=DecayedRatio)
    """Groups trained on per group trained on or dropped as stale."""
    busy: DecayedRatio = field(default_factory=DecayedRatio)
    """Busy seconds per second that the learner was busy or waited for data."""
    supply_progress: float | None = None
    """Share of the learner that the engines fed in the last interval; None when that cannot be told."""
    heard_s: float | None = None
    """Time of the learner's last sign of life."""
    _generated_tokens: float = 0.0

    def engine(self, unit_type: str = ONLY_TYPE) -> EngineMeter:
        """The engines on units of one type."""
        return self.engines.setdefault(unit_type, EngineMeter(self.settings.time_constant_s))

    def add_generated(self, tokens: float, request_s: float, *, evidence_s: float, unit_type: str = ONLY_TYPE) -> None:
        """Count what engines generated in `request_s` request-seconds, `evidence_s` seconds of one busy engine."""
        self._generated_tokens += tokens
        self.engine(unit_type).add_generated(tokens, request_s, evidence_s=evidence_s)

    def add_engine(
        self, active_s: float, request_s: float, tokens: float, *, interval_s: float, running: float, is_full: bool,
        num_engines: int = 1,
    ) -> None:  # fmt: skip
        """Count what one replica or worker did within `interval_s`.

        active_s: time with a request running; request_s: integral of running requests over time; running: requests
        now; is_full: others wait, so `running` is all that fits.
        """
        self.add_generated(tokens, request_s, evidence_s=active_s / max(1, num_engines))
        self.engine().add_running(running, is_full=is_full)
        self.engine().add_sample(active_s, request_s, tokens, interval_s=interval_s, num_engines=num_engines)

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

    def demand_requests(self, unit_type: str = ONLY_TYPE, *, min_evidence_s: float = 0.0) -> float | None:
        """Requests in flight that just keep the learner busy (Little's law): kappa / y times seconds per token.

        All of them on units of this type. None while unknown.
        """
        trained = self.learner.value(self.settings.min_busy_s)
        seconds_per_token = self.engine(unit_type).seconds_per_token(min_evidence_s)
        if not trained or not seconds_per_token:
            return None
        return trained * seconds_per_token / self.trained_share()

    def demand_units(
        self, units_per_replica: int, unit_type: str = ONLY_TYPE, *, min_evidence_s: float = 0.0
    ) -> float | None:
        """Units of this type that just keep the learner busy: d = kappa / (R y). None while unknown."""
        requests = self.demand_requests(unit_type, min_evidence_s=min_evidence_s)
        full_requests = self.engine(unit_type).full_requests
        if requests is None or full_requests is None:
            return None
        return requests * units_per_replica / full_requests

    def progress(self) -> float:
        """Busy share of the learner, 0 while unknown."""
        return self.busy.value(0.0) or 0.0


def increments(new: tuple[float, ...], old: tuple[float, ...]) -> tuple[float, ...]:
    """What came on top of `old`; a total that went backwards started again at zero."""
    if any(a < b for a, b in zip(new, old, strict=True)):
        return new
    return tuple(a - b for a, b in zip(new, old, strict=True))
