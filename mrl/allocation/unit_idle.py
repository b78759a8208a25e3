"""How much of the time every unit did nothing: nobody's, or its engine without an answer in flight."""

from collections.abc import Iterable

from mrl.allocation.meter import increments
from mrl.records.leases import LeaseRequest

INTERVAL_S = 10.0
"""Least time that a share is about: engines tell their totals about once a second."""


class UnitIdle:
    """The idle time of every unit, from the totals that engines tell with every request for their lease."""

    def __init__(self, units: Iterable[str], now_s: float) -> None:
        self._busy_s = dict.fromkeys(units, 0.0)
        """Told by engines and not yet part of a share."""
        self._totals: dict[str, tuple[int, float]] = {}
        """Epoch and active seconds of the engine on a unit, as it was heard last."""
        self._since_s = now_s

    def hear(self, request: LeaseRequest) -> None:
        """Take the word of the engine on a unit; of its first one only what comes after it counts."""
        epoch, before_s = self._totals.get(request.unit, (0, 0.0))
        if epoch == request.unit_epoch:
            self._busy_s[request.unit] += increments((request.active_s,), (before_s,))[0]
        self._totals[request.unit] = (request.unit_epoch, request.active_s)

    def take(self, now_s: float) -> dict[str, float]:
        """Idle share of every unit since it was last told; nothing before `INTERVAL_S` have passed.

        Engines are heard after the fact. What they were busy beyond the interval counts in the next one, so that the
        mean over intervals is right.
        """
        interval_s = now_s - self._since_s
        if interval_s < INTERVAL_S:
            return {}
        self._since_s = now_s
        shares = {}
        for unit, busy_s in self._busy_s.items():
            counted_s = min(busy_s, interval_s)
            self._busy_s[unit] -= counted_s
            shares[unit] = 1.0 - counted_s / interval_s
        return shares
