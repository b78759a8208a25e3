"""What the engines on units did, from the totals that they tell with every request for their lease."""

from typing import NamedTuple

from mrl.allocation.meter import increments
from mrl.records.leases import LeaseRequest

SAMPLE_S = 5.0
"""Least time of one point of the latency line: an engine's own count of tokens may be a second old."""


class LineSample(NamedTuple):
    """One point of the latency line."""

    interval_s: float
    active_s: float
    """Time with an answer in flight."""
    slot_seconds: float
    tokens: float


class EngineUse(NamedTuple):
    """What one engine did since it was heard last."""

    tokens: float
    """Of the groups that it completed."""
    slot_seconds: float
    full_answers: int = 0
    """Answers in flight with which it was full; 0 while all that it may have in flight fits."""
    sample: LineSample | None = None


class _Heard(NamedTuple):
    epoch: int
    done: tuple[float, float]
    """Tokens of complete groups, slot-seconds."""
    marked_s: float
    """When the point of the line under way began."""
    mark: tuple[float, float, float]
    """Active seconds, slot-seconds and sampled tokens then."""


class EngineUses:
    """The engine on every unit, as it was heard last."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def take(self, request: LeaseRequest, now_s: float) -> EngineUse | None:
        """What is new; None when this is the first word of an engine."""
        done = (float(request.generated_tokens), request.slot_seconds)
        mark = (request.active_s, request.slot_seconds, float(request.sampled_tokens))
        before = self._heard.get(request.unit)
        if before is None or before.epoch != request.unit_epoch:
            self._heard[request.unit] = _Heard(request.unit_epoch, done, now_s, mark)
            return None
        interval_s, sample = now_s - before.marked_s, None
        if interval_s >= SAMPLE_S:
            sample = LineSample(interval_s, *increments(mark, before.mark))
            before = before._replace(marked_s=now_s, mark=mark)
        self._heard[request.unit] = before._replace(done=done)
        tokens, slot_seconds = increments(done, before.done)
        return EngineUse(tokens, slot_seconds, request.full_answers, sample)
