"""How many units each policy should have: the controller of shares, fed with what engines on units and learners report.

Moving an engine takes seconds to minutes, and how long is measured; the rule's times follow from it.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from mrl.allocation.decision import ControllerState, DecisionRecord, decide
from mrl.allocation.meter import MeterSettings, PolicyMeter, increments
from mrl.allocation.worth import Reading, Rule
from mrl.records.leases import LearnerReport

PERIODS_PER_DWELL = 4
SWITCHES_PER_DWELL = 20
"""Between two moves: with this, switching costs at most a twentieth of the time."""
DWELLS_PER_WINDOW = 8
NEWEST_SWITCH_WEIGHT = 0.3
MIN_EVIDENCE_S = 1.0

N = TypeVar("N", int, float)


class MeasuredShares:
    """Measures every policy and decides once a period; policies on units of different kinds do not compete."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        *,
        rule: Rule,
        floor_units: int,
        slots_per_unit: int,
        hung_s: float,
        memory_s: float = 60.0,
        now_s: float = 0.0,
    ) -> None:
        """`kinds`: policy -> kind of unit that its engine fits. `memory_s`: memory of measured rates, in busy time."""
        self.record: DecisionRecord | None = None
        """The decision made last, with what led to it."""
        settings = MeterSettings(
            time_constant_s=memory_s,
            yield_constant_s=3 * memory_s,
            min_busy_s=MIN_EVIDENCE_S,
            doubtful_s=hung_s / 2,
            silent_s=hung_s,
        )
        self._kinds, self._order = dict(kinds), tuple(sorted(set(kinds.values())))
        self._rule, self._floor_units, self._slots_per_unit = rule, floor_units, slots_per_unit
        self._meters = {policy: PolicyMeter(settings) for policy in kinds}
        self._learner_totals: dict[str, tuple[float, float, float]] = {}
        self._switch_s: dict[str, float] = {}
        self._released: set[str] = set()
        self._state = ControllerState(decided_s=now_s)
        self._measured_s = now_s
        self._circumstances: tuple[object, ...] = ()

    def add_rollout(self, policy: str, tokens: float, slot_seconds: float, interval_s: float, num_units: int) -> None:
        """Count what one engine did within `interval_s`, while its policy held `num_units`."""
        self._meters[policy].add_engine(
            min(interval_s, slot_seconds),
            slot_seconds,
            tokens,
            interval_s=interval_s,
            running=self._slots_per_unit,
            is_full=False,
            num_engines=num_units,
        )

    def add_report(self, report: LearnerReport, now_s: float) -> None:
        """Count a learner's totals; totals that went backwards are those of a learner started again."""
        totals = (float(report.trained_tokens), report.busy_s, report.data_wait_s)
        before = self._learner_totals.get(report.policy, (0.0, 0.0, 0.0))
        self._learner_totals[report.policy] = totals
        tokens, busy_s, wait_s = increments(totals, before)
        meter = self._meters[report.policy]
        meter.add_learner(tokens, busy_s, wait_s, 0.0, 0.0)
        meter.hear(now_s)

    def add_switch(self, policy: str, switch_s: float) -> None:
        """Count how long it took from a grant to the engine's first word."""
        before = self._switch_s.get(policy, switch_s)
        self._switch_s[policy] = before + NEWEST_SWITCH_WEIGHT * (switch_s - before)

    def release(self, policy: str) -> None:
        """The policy needs no engine any more."""
        self._released.add(policy)

    def targets(self, usable: Mapping[str, int], held: Mapping[str, int], now_s: float) -> dict[str, int]:
        """Units per policy. `usable`: units that each policy's engine fits; `held`: what each has now."""
        self._end_interval(held, now_s)
        capacity = tuple(
            max((usable[policy] for policy, other in self._kinds.items() if other == kind), default=0)
            for kind in self._order
        )
        readings = [self._reading(policy, held[policy], now_s) for policy in self._kinds]
        circumstances = (capacity, tuple(reading.silent for reading in readings))
        urgent, self._circumstances = circumstances != self._circumstances, circumstances
        self._state, self.record = decide(self._timed_rule(), self._state, readings, capacity, now_s, urgent=urgent)
        return {policy: sum(shares) for policy, shares in self.record.shares.items()}

    def demand_units(self, policy: str) -> float:
        """Units that just keep the learner busy; 0 while unknown."""
        return self._meters[policy].demand_units(1) or 0.0

    def progress(self, policy: str) -> float:
        """Busy share of the learner, 0 while unknown."""
        return self._meters[policy].progress()

    def _end_interval(self, held: Mapping[str, int], now_s: float) -> None:
        interval_s = now_s - self._measured_s
        if interval_s < MIN_EVIDENCE_S:
            return
        self._measured_s = now_s
        for policy, meter in self._meters.items():
            meter.end_interval(interval_s, now_s, num_engines=held[policy])

    def _reading(self, policy: str, held: int, now_s: float) -> Reading:
        meter = self._meters[policy]
        demand = meter.demand_units(1)
        return Reading(
            policy=policy,
            replicas=self._by_kind(policy, held),
            progress_per_replica=None if demand is None else self._by_kind(policy, 1.0 / demand),
            supply_progress=meter.supply_progress,
            floor_replicas=self._floor_units,
            silent=policy in self._released or meter.is_silent(now_s),
            switch_s=self._switch_s.get(policy, 0.0),
        )

    def _by_kind(self, policy: str, value: N) -> tuple[N, ...]:
        """`value` at the policy's own kind of unit, nothing at the others."""
        return tuple(value if kind == self._kinds[policy] else type(value)() for kind in self._order)

    def _timed_rule(self) -> Rule:
        switch_s = max(self._switch_s.values(), default=0.0)
        dwell_s = max(PERIODS_PER_DWELL * self._rule.period_s, SWITCHES_PER_DWELL * switch_s)
        return msgspec.structs.replace(
            self._rule, dwell_s=dwell_s, hold_s=dwell_s, window_s=DWELLS_PER_WINDOW * dwell_s, moves_per_unit_hour=None
        )
