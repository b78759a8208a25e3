"""Measurement of one policy: supply, demand and silence, from increments of counters of its engines and learner.

Engines are measured apart for every type of unit that they run on, the learner once. Estimates decay by evidence
(seconds in which engine or learner were busy), never by wall time: a policy that stands still keeps its estimate.
"""

from dataclasses import dataclass, field

from mrl.allocation.allocation_limits import MIN_TRAINED_SHARE
from mrl.allocation.engine_meter import DecayedRatio, EngineMeter

ONLY_TYPE = ""
"""The type of all units where types are not told apart."""


@dataclass(frozen=True, slots=True)
class MeterSettings:
    """Time constants of the estimates, and times of silence."""

    time_constant_s: float = 600.0
    """Time constant of rates, in busy seconds."""
    yield_constant_s: float = 1800.0
    """Time constant of the share of groups that were trained on, in busy seconds."""
    min_busy_s: float = 20.0
    """Least evidence of a learner's rate, in busy seconds."""
    min_interval_s: float = 1.0
    """Least seconds of an interval; the work of a shorter one counts with the next."""
    doubtful_s: float = 60.0
    """Seconds of silence after which a learner tells nothing about its progress."""
    silent_s: float = 120.0
    """Seconds of silence after which a learner hangs: learners speak while they train and while they wait."""


@dataclass
class PolicyMeter:
    """Estimates about one policy."""

    settings: MeterSettings = field(default_factory=MeterSettings)
    engines: dict[str, EngineMeter] = field(default_factory=dict)
    """Type of unit -> engines there; use `engine`."""
    learner: DecayedRatio = field(default_factory=DecayedRatio)
    """Trained tokens per busy second."""
    groups: DecayedRatio = field(default_factory=DecayedRatio)
    """Groups trained on per group trained on or dropped as stale."""
    busy: DecayedRatio = field(default_factory=DecayedRatio)
    """Busy seconds per second in which the learner was busy or waited for data."""
    supply_progress: float | None = None
    """Share of the learner that the engines fed in the last interval; None when that cannot be told."""
    heard_s: float | None = None
    """Time of the learner's last sign of life."""
    _generated_tokens: float = 0.0

    def engine(self, unit_type: str = ONLY_TYPE) -> EngineMeter:
        """Return the meter of the engines on units of one type."""
        return self.engines.setdefault(unit_type, EngineMeter(self.settings.time_constant_s))

    def add_generated(self, tokens: float, request_s: float, *, evidence_s: float, unit_type: str = ONLY_TYPE) -> None:
        """Count tokens generated in `request_s` request-seconds, which took one engine `evidence_s` busy seconds."""
        self._generated_tokens += tokens
        self.engine(unit_type).add_generated(tokens, request_s, evidence_s=evidence_s)

    def add_learner(
        self, tokens: float, busy_s: float, data_wait_s: float, trained_groups: float, dropped_groups: float
    ) -> None:
        """Count the work of the learner since the last call."""
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
        """Whether the learner spoke once and then fell silent: it hangs, or is done with its steps."""
        return self.heard_s is not None and now_s - self.heard_s > self.settings.silent_s

    def end_interval(self, interval_s: float, now_s: float, *, num_engines: int) -> bool:
        """Turn the tokens generated in these seconds into `supply_progress`; False when the interval is too short."""
        doubtful = self.heard_s is not None and now_s - self.heard_s >= self.settings.doubtful_s
        needed = self.needed_tokens(interval_s)
        if num_engines == 0:
            self.supply_progress = 0.0
        elif needed is None or doubtful:
            self.supply_progress = None
        elif interval_s >= self.settings.min_interval_s:
            self.supply_progress = min(1.0, self._generated_tokens / needed)
        else:
            return False
        self._generated_tokens = 0.0
        return True

    def needed_tokens(self, interval_s: float) -> float | None:
        """Return the generated tokens that keep the learner busy for `interval_s`; None while its rate is unknown."""
        trained = self.learner.value(self.settings.min_busy_s)
        return trained * interval_s / self.trained_share() if trained else None

    def trained_share(self) -> float:
        """Return the share of the generated groups that are trained on (y), at least `MIN_TRAINED_SHARE`."""
        measured = self.groups.value(0.0)
        return max(MIN_TRAINED_SHARE, 1.0 if measured is None else measured)

    def demand_requests(self, unit_type: str = ONLY_TYPE, *, min_evidence_s: float = 0.0) -> float | None:
        """Return the requests in flight that just keep the learner busy (Little's law): kappa / y * seconds per token.

        kappa: trained tokens per busy second. All requests run on units of this type. None while unknown.
        """
        trained = self.learner.value(self.settings.min_busy_s)
        seconds_per_token = self.engine(unit_type).seconds_per_token(min_evidence_s)
        if not trained or not seconds_per_token:
            return None
        return trained * seconds_per_token / self.trained_share()

    def demand_units(
        self, units_per_replica: int, unit_type: str = ONLY_TYPE, *, min_evidence_s: float = 0.0
    ) -> float | None:
        """Return the units of this type that just keep the learner busy: d = kappa / (R y). None while unknown."""
        requests = self.demand_requests(unit_type, min_evidence_s=min_evidence_s)
        full_requests = self.engine(unit_type).full_requests
        if requests is None or full_requests is None:
            return None
        return requests * units_per_replica / full_requests

    def progress(self) -> float:
        """Return the busy share of the learner; 0 while unknown."""
        return self.busy.value(0.0) or 0.0


def increments(new: tuple[float, ...], old: tuple[float, ...]) -> tuple[float, ...]:
    """Return the growth of totals over `old`. Where one of them went backwards, all began again at zero."""
    if any(a < b for a, b in zip(new, old, strict=True)):
        return new
    return tuple(a - b for a, b in zip(new, old, strict=True))
