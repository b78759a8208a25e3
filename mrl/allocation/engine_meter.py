"""What is known about the engines of one policy on one type of unit, from increments of their counters.

Estimates decay by evidence (seconds that an engine was busy), never by wall time.
"""

import math
from dataclasses import dataclass, field

from mrl.allocation.latency_line import LatencyLine


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
class EngineMeter:
    """Speed and size of these engines."""

    time_constant_s: float
    """Memory of rates, in busy seconds."""
    line: LatencyLine = field(default_factory=LatencyLine)
    rollout: DecayedRatio = field(default_factory=DecayedRatio)
    """Generated tokens per request-second."""
    full_requests: float | None = None
    """Requests that a replica runs when it is full (C); None: unknown, or the units are requests themselves."""

    def add_generated(self, tokens: float, request_s: float, *, evidence_s: float) -> None:
        """Count what engines generated in `request_s` request-seconds, `evidence_s` seconds of one busy engine."""
        if request_s > 0.0:
            self.rollout.add(tokens, request_s, evidence_s, self.time_constant_s)

    def add_running(self, running: float, *, is_full: bool) -> None:
        """Count requests that one replica runs; is_full: others wait, so this is all that fits."""
        if running > 0 and (is_full or running > (self.full_requests or 0.0)):
            self.full_requests = float(running)

    def add_sample(
        self, active_s: float, request_s: float, tokens: float, *, interval_s: float, num_engines: int = 1
    ) -> None:
        """Count one point of the latency line: what one of `num_engines` did within `interval_s`.

        active_s: time with a request running; request_s: integral of running requests over time. Not counted while it
        mostly had nothing to do: such an interval is full of beginnings and ends.
        """
        if active_s > interval_s / 2 and tokens > 0.0:
            keep = math.exp(-active_s / max(1, num_engines) / self.time_constant_s)
            self.line.add(request_s / active_s, request_s / tokens, keep)

    def seconds_per_token(self, min_evidence_s: float = 0.0) -> float | None:
        """Of a request in a full replica where it is known what fits into one, else as engines were run of late.

        None while unknown.
        """
        generated = self.rollout.value(min_evidence_s)
        if not generated:
            return None
        full = None if self.full_requests is None else self.line.seconds_per_token(self.full_requests)
        return full or 1.0 / generated
