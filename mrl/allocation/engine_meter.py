"""Speed of the engines of one policy on one type of unit, from increments of their counters.

Estimates decay by evidence (seconds in which an engine was busy), never by wall time. On a type where the policy's
engines never ran, their speed is foreseen from what other policies lose or gain there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

RIDGE = (1e-4, 1e-2)
"""Ridge on the diagonal of the normal equations: samples at one place would else divide by zero."""


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
        """Return the ratio; None while there is too little evidence."""
        if self.evidence_s < min_evidence_s or self.denominator <= 0.0:
            return None
        return self.numerator / self.denominator


@dataclass
class LatencyLine:
    """Seconds per token of a request beside c - 1 others: a line a + b c, by decayed least squares with a ridge.

    An engine that never ran full has shown its speed half empty only; the line foresees the speed of a full engine.
    """

    ones: float = 0.0
    sum_c: float = 0.0
    sum_cc: float = 0.0
    sum_z: float = 0.0
    sum_cz: float = 0.0

    def add(self, running: float, seconds_per_token: float, keep: float) -> None:
        """Count one sample, after scaling the earlier samples by `keep`."""
        self.ones = self.ones * keep + 1.0
        self.sum_c = self.sum_c * keep + running
        self.sum_cc = self.sum_cc * keep + running * running
        self.sum_z = self.sum_z * keep + seconds_per_token
        self.sum_cz = self.sum_cz * keep + running * seconds_per_token

    def seconds_per_token(self, running: float) -> float | None:
        """Return the line at c = running; the mean where samples tell no line; None without samples.

        Samples tell no line where one request would take no time (a <= 0), or more requests less time each (b < 0).
        """
        if self.ones <= 0.0:
            return None
        p, q, r = self.ones + RIDGE[0], self.sum_c, self.sum_cc + RIDGE[1]
        determinant = p * r - q * q
        a = (self.sum_z * r - self.sum_cz * q) / determinant
        b = (self.sum_cz * p - self.sum_z * q) / determinant
        return self.sum_z / self.ones if a <= 0.0 or b < 0.0 else a + b * running


@dataclass
class EngineMeter:
    """Speed and size of the engines of one policy on one type of unit."""

    time_constant_s: float
    """Time constant of rates, in busy seconds."""
    line: LatencyLine = field(default_factory=LatencyLine)
    rollout: DecayedRatio = field(default_factory=DecayedRatio)
    """Generated tokens per request-second."""
    full_requests: float | None = None
    """Requests that a full replica runs (C). None: unknown, or the units are requests themselves."""

    def add_generated(self, tokens: float, request_s: float, *, evidence_s: float) -> None:
        """Count tokens generated in `request_s` request-seconds, which took one engine `evidence_s` busy seconds."""
        if request_s > 0.0:
            self.rollout.add(tokens, request_s, evidence_s, self.time_constant_s)

    def add_sample(
        self, active_s: float, request_s: float, tokens: float, *, interval_s: float, num_engines: int = 1
    ) -> None:
        """Count one point of the latency line: the work of one of `num_engines` engines within `interval_s`.

        active_s: time with a request running. request_s: integral of running requests over time. An interval in which
        the engine was mostly idle is full of beginnings and ends, and does not count.
        """
        if active_s > interval_s / 2 and tokens > 0.0:
            keep = math.exp(-active_s / max(1, num_engines) / self.time_constant_s)
            self.line.add(request_s / active_s, request_s / tokens, keep)

    def seconds_per_token(self, min_evidence_s: float = 0.0) -> float | None:
        """Return the seconds per token of a request in a full replica; None while unknown.

        Where the size of a full replica is unknown, the engines count as full as they were of late.
        """
        generated = self.rollout.value(min_evidence_s)
        if not generated:
            return None
        full = None if self.full_requests is None else self.line.seconds_per_token(self.full_requests)
        return full or 1.0 / generated


Speeds = Sequence[float | None]
"""Speeds of one policy by type of unit, in any measure that is the same over types; None where not measured."""


def foreseen_speeds(measured: Mapping[str, Speeds]) -> dict[str, tuple[float, ...] | None]:
    """Return the speeds of every policy with the gaps filled; None for a policy that was measured nowhere.

    A gap is filled from each type on which the policy was measured, by the mean ratio of the two types over the
    policies that were measured on both; the mean of these estimates is taken. Types that no policy connects count as
    equally fast. All means are geometric, since speeds differ by factors.
    """
    return {policy: _filled(speeds, measured) for policy, speeds in measured.items()}


def _filled(speeds: Speeds, measured: Mapping[str, Speeds]) -> tuple[float, ...] | None:
    known = {kind: speed for kind, speed in enumerate(speeds) if speed is not None}
    if not known:
        return None
    filled = []
    for kind, speed in enumerate(speeds):
        ratios = {other: _ratio(kind, other, measured) for other in known}
        related = [known[other] * ratio for other, ratio in ratios.items() if ratio is not None]
        filled.append(geometric_mean(related or known.values()) if speed is None else speed)
    return tuple(filled)


def _ratio(kind: int, other: int, measured: Mapping[str, Speeds]) -> float | None:
    """Return the speed on type `kind` over the speed on type `other`; None where no policy was measured on both."""
    pairs = [(speeds[kind], speeds[other]) for speeds in measured.values()]
    ratios = [one / two for one, two in pairs if one is not None and two is not None]
    return geometric_mean(ratios) if ratios else None
