"""The work of engines on units, from the totals that they tell with every request for their lease."""

from collections.abc import Iterable
from typing import NamedTuple

from mrl.allocation.allocation_limits import IDLE_INTERVAL_S, LINE_SAMPLE_S
from mrl.allocation.meter import increments
from mrl.records.leases import LeaseRequest


class LineSample(NamedTuple):
    """One point of the latency line."""

    interval_s: float
    active_s: float
    """Time with an answer in flight."""
    slot_seconds: float
    tokens: float


class EngineIncrement(NamedTuple):
    """The work of one engine since its last request."""

    tokens: float
    """Tokens of complete groups."""
    slot_seconds: float
    full_answers: int = 0
    """Answers in flight with which the engine was full; 0 while all that it may have in flight fits."""
    sample: LineSample | None = None


class _Heard(NamedTuple):
    epoch: int
    done: tuple[float, float]
    """Tokens of complete groups, slot-seconds."""
    marked_s: float
    """Time at which the point of the line under way began."""
    mark: tuple[float, float, float]
    """Active seconds, slot-seconds and sampled tokens at that time."""


class EngineTotals:
    """The newest totals of the engine on every unit."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def increment(self, request: LeaseRequest, now_s: float) -> EngineIncrement | None:
        """Return the work since the engine's last request; None for the first request of an engine."""
        done = (float(request.generated_tokens), request.slot_seconds)
        mark = (request.active_s, request.slot_seconds, float(request.sampled_tokens))
        before = self._heard.get(request.unit)
        if before is None or before.epoch != request.unit_epoch:
            self._heard[request.unit] = _Heard(request.unit_epoch, done, now_s, mark)
            return None
        interval_s, sample = now_s - before.marked_s, None
        if interval_s >= LINE_SAMPLE_S:
            sample = LineSample(interval_s, *increments(mark, before.mark))
            before = before._replace(marked_s=now_s, mark=mark)
        self._heard[request.unit] = before._replace(done=done)
        tokens, slot_seconds = increments(done, before.done)
        return EngineIncrement(tokens, slot_seconds, request.full_answers, sample)


class UnitIdle:
    """The idle time of every unit: time without an owner, or without an answer in its engine."""

    def __init__(self, units: Iterable[str], now_s: float) -> None:
        self._busy_s = dict.fromkeys(units, 0.0)
        """Unit -> busy seconds told by engines that are not part of a share yet."""
        self._totals: dict[str, tuple[int, float]] = {}
        """Unit -> epoch and active seconds of its engine, by the last request."""
        self._since_s = now_s

    def add(self, request: LeaseRequest) -> None:
        """Count a request of the engine on a unit; the first request of an engine only begins the count."""
        epoch, before_s = self._totals.get(request.unit, (0, 0.0))
        if epoch == request.unit_epoch:
            self._busy_s[request.unit] += increments((request.active_s,), (before_s,))[0]
        self._totals[request.unit] = (request.unit_epoch, request.active_s)

    def shares(self, now_s: float) -> dict[str, float]:
        """Return the idle share of every unit since the last shares; empty before `IDLE_INTERVAL_S` have passed.

        Engines tell their busy time after the fact. Busy time beyond the interval counts in the next interval, so that
        the mean over intervals is right.
        """
        interval_s = now_s - self._since_s
        if interval_s < IDLE_INTERVAL_S:
            return {}
        self._since_s = now_s
        shares = {}
        for unit, busy_s in self._busy_s.items():
            counted_s = min(busy_s, interval_s)
            self._busy_s[unit] -= counted_s
            shares[unit] = 1.0 - counted_s / interval_s
        return shares
