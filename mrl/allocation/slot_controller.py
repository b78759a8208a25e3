"""The controller of slots: meters of all policies, and the shares decided from them.

A replica is one group of answers, since a worker starts a group only when its lease holds all of it. Where slots lie
on units of several types, engines are measured and shares decided by type.
"""

from collections.abc import Mapping, Sequence

from mrl.allocation.allocation_limits import (
    MIN_BUSY_S,
    MIN_TYPE_S,
    SUPPLY_INTERVAL_S,
    TIME_CONSTANT_S,
    YIELD_CONSTANT_S,
)
from mrl.allocation.decision import ControllerState, DecisionRecord, decide
from mrl.allocation.engine_meter import foreseen_speeds
from mrl.allocation.engine_totals import EngineIncrement
from mrl.allocation.meter import ONLY_TYPE, MeterSettings, PolicyMeter, increments
from mrl.allocation.objective import Reading, Rule
from mrl.records.leases import LearnerReport


class SlotController:
    """Divides `slots` between policies, in whole groups of answers.

    group_sizes: answers per group of a policy. weights: priority of a policy. Both are 1 by default.
    """

    def __init__(
        self,
        policies: Sequence[str],
        rule: Rule,
        *,
        slots: int,
        floor_slots: int,
        silent_s: float,
        group_sizes: Mapping[str, int],
        weights: Mapping[str, float],
        now_s: float,
    ) -> None:
        settings = MeterSettings(
            time_constant_s=TIME_CONSTANT_S,
            yield_constant_s=YIELD_CONSTANT_S,
            min_busy_s=MIN_BUSY_S,
            min_interval_s=SUPPLY_INTERVAL_S,
            doubtful_s=silent_s / 2,
            silent_s=silent_s,
        )
        self.meters = {policy: PolicyMeter(settings) for policy in policies}
        self.num_reports = dict.fromkeys(policies, 0)
        self.record: DecisionRecord | None = None
        """The newest decision."""
        self.state = ControllerState(decided_s=now_s)
        self.shares: dict[str, dict[str, int]] = {policy: {} for policy in policies}
        """Slots per policy and type of unit."""
        self.rule = rule
        self.capacity = {ONLY_TYPE: slots}
        """Slots per type of unit."""
        self.unfit: dict[str, frozenset[str]] = dict.fromkeys(policies, frozenset())
        """Policy -> types of unit on which its engine does not fit."""
        self.switch_s = dict.fromkeys(policies, 0.0)
        """Policy -> seconds from the grant of a slot until it serves."""
        self._group = {policy: group_sizes.get(policy, 1) for policy in policies}
        floor = min(floor_slots, slots // max(1, len(policies)))
        self._floor = {policy: max(min(1, floor), floor // size) for policy, size in self._group.items()}
        highest = max((weights.get(policy, 1.0) for policy in policies), default=1.0)
        self._weight = {policy: weights.get(policy, 1.0) / highest for policy in policies}
        self._learner_totals: dict[str, tuple[float, ...]] = {}
        self._supplied_s = dict.fromkeys(policies, now_s)
        self._absent: frozenset[str] = frozenset(policies)

    def add_learner(self, report: LearnerReport, now_s: float) -> None:
        """Count a learner's totals; the totals of a restarted learner begin again at zero."""
        meter, policy = self.meters[report.policy], report.policy
        totals = (
            float(report.trained_tokens),
            report.busy_s,
            report.data_wait_s,
            float(report.trained_groups),
            float(report.dropped_groups),
        )
        before = self._learner_totals.get(policy, (0.0,) * len(totals))
        tokens, busy_s, *others = increments(totals, before)
        # A restarted allocator hears the totals of a learner's whole life, which is more than the meter's memory.
        part = min(1.0, TIME_CONSTANT_S / busy_s) if busy_s else 1.0
        meter.add_learner(*(part * new for new in (tokens, busy_s, *others)))
        meter.hear(now_s)
        self._learner_totals[policy] = totals
        self.num_reports[policy] += totals != before  # a repeated report is a sign of life alone

    @property
    def targets(self) -> dict[str, int]:
        """Slots per policy."""
        return {policy: sum(share.values()) for policy, share in self.shares.items()}

    def add_worker(
        self, policy: str, tokens: float, slot_seconds: float, held_slots: int, unit_type: str = ONLY_TYPE
    ) -> None:
        """Count the work of a worker since its last request, which it did on `held_slots` at most."""
        evidence_s = slot_seconds / max(1, held_slots)
        self.meters[policy].add_generated(tokens, slot_seconds, evidence_s=evidence_s, unit_type=unit_type)

    def add_engine(
        self, policy: str, use: EngineIncrement, slots_per_engine: int, *, num_engines: int, unit_type: str = ONLY_TYPE
    ) -> None:
        """Count the work of one of `num_engines` engines on units of a type.

        slots_per_engine: answers that each engine may have in flight.
        """
        self.add_worker(policy, use.tokens, use.slot_seconds, slots_per_engine, unit_type)
        meter = self.meters[policy].engine(unit_type)
        meter.full_requests = float(use.full_answers or slots_per_engine)
        if use.sample is not None:
            interval_s, active_s, slot_seconds, tokens = use.sample
            meter.add_sample(active_s, slot_seconds, tokens, interval_s=interval_s, num_engines=num_engines)

    def is_due(self, now_s: float, holders: Mapping[str, int]) -> bool:
        """Whether a decision is due: a period has passed, or a policy came, went, fell silent or came back."""
        return self._unable(now_s, holders) != self._absent or now_s - self.state.decided_s >= self.rule.period_s

    def decide(self, now_s: float, holders: Mapping[str, int], *, urgent: bool = False) -> None:
        """Decide the shares anew.

        holders: workers per policy; a first worker that may still be starting counts as one.
        urgent: units came or went, so that dwell and least gain do not apply.
        """
        unable = self._unable(now_s, holders)
        urgent, self._absent = urgent or unable != self._absent, unable
        for policy, meter in self.meters.items():
            if meter.end_interval(now_s - self._supplied_s[policy], now_s, num_engines=holders.get(policy, 0)):
                self._supplied_s[policy] = now_s
        capacity = tuple(self.capacity.values())
        self.state, self.record = decide(self.rule, self.state, self._readings(), capacity, now_s, urgent=urgent)
        self.shares = {
            policy: {kind: count * size for kind, count in zip(self.capacity, self.record.shares[policy], strict=True)}
            for policy, size in self._group.items()
        }

    def demand_slots(self, policy: str) -> float:
        """Return the fastest type's slots that just keep the policy's learner busy; 0 while unknown or unusable."""
        measured = [demand for kind in self.capacity if (demand := self._demand(policy, kind, 0.0))]
        return 0.0 if policy in self._absent else min(measured, default=0.0)

    def tokens_per_s(self, policy: str, unit_type: str) -> float:
        """Return the tokens per second of a full engine on a unit of a type; 0 while unknown."""
        engine = self.meters[policy].engine(unit_type)
        seconds_per_token = engine.seconds_per_token()
        return engine.full_requests / seconds_per_token if engine.full_requests and seconds_per_token else 0.0

    def _demand(self, policy: str, unit_type: str, min_evidence_s: float) -> float | None:
        """Return the slots of a type that just keep the learner busy; None while unknown.

        The demand of an engine that holds fewer answers than it has slots counts all of its slots.
        """
        meter, size = self.meters[policy], self._group[policy]
        if meter.engine(unit_type).full_requests is None:
            return meter.demand_requests(unit_type, min_evidence_s=min_evidence_s)
        return meter.demand_units(size, unit_type, min_evidence_s=min_evidence_s)

    def _unable(self, now_s: float, holders: Mapping[str, int]) -> frozenset[str]:
        """Return the policies that can use no slot: they have no worker, or their learner is silent."""
        return frozenset(
            policy for policy, meter in self.meters.items() if not holders.get(policy) or meter.is_silent(now_s)
        )

    def _readings(self) -> list[Reading]:
        measured = {policy: self._measured(policy) for policy in self.meters}
        speeds = foreseen_speeds(measured)
        return [self._reading(policy, speeds[policy]) for policy in self.meters]

    def _measured(self, policy: str) -> list[float | None]:
        """Return the share of the policy's learner that one replica feeds, by type of unit; None where unmeasured."""
        size, found = self._group[policy], list[float | None]()
        # With several types a little evidence may be misleading; where no type has more, it is better than none.
        for min_evidence_s in (MIN_TYPE_S, 0.0) if len(self.capacity) > 1 else (0.0,):
            demands = [self._demand(policy, kind, min_evidence_s) for kind in self.capacity]
            found = [None if demand is None else size / demand for demand in demands]
            if any(found):
                break
        return found

    def _reading(self, policy: str, speeds: tuple[float, ...] | None) -> Reading:
        meter, size = self.meters[policy], self._group[policy]
        unfit = tuple(kind in self.unfit[policy] for kind in self.capacity)
        if speeds is not None:
            speeds = tuple(0.0 if is_unfit else speed for speed, is_unfit in zip(speeds, unfit, strict=True))
        return Reading(
            policy=policy,
            replicas=tuple(self.shares[policy].get(kind, 0) // size for kind in self.capacity),
            progress_per_replica=speeds,
            unfit=unfit if any(unfit) else (),
            supply_progress=meter.supply_progress,
            units_per_replica=size,
            floor_replicas=self._floor[policy],
            silent=policy in self._absent,
            switch_s=self.switch_s[policy],
            weight=self._weight[policy],
            learner_tokens_per_s=meter.learner.value(MIN_BUSY_S) or 0.0,
        )
