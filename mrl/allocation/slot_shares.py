"""The controller of slots: meters of all policies, and the shares decided from them.

A replica is one group of answers, since a worker starts a group only when its lease holds all of it.
"""

from collections.abc import Mapping, Sequence

from mrl.allocation.decision import ControllerState, DecisionRecord, decide
from mrl.allocation.engine_use import EngineUse
from mrl.allocation.meter import MeterSettings, PolicyMeter, increments
from mrl.allocation.worth import Reading, Rule
from mrl.records.leases import LearnerReport

TIME_CONSTANT_S = 60.0
YIELD_CONSTANT_S = 180.0
MIN_BUSY_S = 1.0
SUPPLY_INTERVAL_S = 5.0
"""Workers count tokens when a group is complete: over shorter times supply is all or nothing."""


class SlotShares:
    """Shares of `slots` between policies, in slots: whole groups each.

    group_sizes: answers per group, 1 where nothing is said; weights: 1 where nothing is said.
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
        self.targets = dict.fromkeys(policies, 0)
        """Slots per policy."""
        self.rule, self.slots = rule, slots
        self.switch_s = dict.fromkeys(policies, 0.0)
        """Time until a slot that is granted serves."""
        self._group = {policy: group_sizes.get(policy, 1) for policy in policies}
        floor = min(floor_slots, slots // max(1, len(policies)))
        self._floor = {policy: max(min(1, floor), floor // size) for policy, size in self._group.items()}
        highest = max((weights.get(policy, 1.0) for policy in policies), default=1.0)
        self._weight = {policy: weights.get(policy, 1.0) / highest for policy in policies}
        self._learner_totals: dict[str, tuple[float, ...]] = {}
        self._supplied_s = dict.fromkeys(policies, now_s)
        self._absent: frozenset[str] = frozenset(policies)

    def add_learner(self, report: LearnerReport, now_s: float) -> None:
        """Take a learner's totals; those of a restarted learner begin again at zero."""
        meter, policy = self.meters[report.policy], report.policy
        totals = (
            float(report.trained_tokens),
            report.busy_s,
            report.data_wait_s,
            float(report.trained_groups),
            float(report.dropped_groups),
        )
        before = self._learner_totals.get(policy, (0.0,) * len(totals))
        meter.add_learner(*increments(totals, before))
        meter.hear(now_s)
        self._learner_totals[policy] = totals
        self.num_reports[policy] += totals != before  # what says nothing new is a sign of life

    def add_worker(self, policy: str, tokens: float, slot_seconds: float, held_slots: int) -> None:
        """Count what a worker did since its last request, while it held `held_slots`."""
        self.meters[policy].add_generated(tokens, slot_seconds, evidence_s=slot_seconds / max(1, held_slots))

    def add_engine(self, policy: str, use: EngineUse, slots_per_engine: int, *, num_engines: int) -> None:
        """Count what one of `num_engines` engines did that may each have `slots_per_engine` answers in flight."""
        meter = self.meters[policy]
        self.add_worker(policy, use.tokens, use.slot_seconds, slots_per_engine)
        meter.full_requests = float(use.full_answers or slots_per_engine)
        if use.sample is not None:
            interval_s, active_s, slot_seconds, tokens = use.sample
            meter.add_sample(active_s, slot_seconds, tokens, interval_s=interval_s, num_engines=num_engines)

    def is_due(self, now_s: float, holders: Mapping[str, int]) -> bool:
        """Whether a decision is to be made: a period has passed, or a policy came, went, fell silent or is back."""
        return self._without(now_s, holders) != self._absent or now_s - self.state.decided_s >= self.rule.period_s

    def decide(self, now_s: float, holders: Mapping[str, int], *, urgent: bool = False) -> None:
        """Decide anew. `holders`: workers per policy; a policy whose first worker may still be starting counts 1."""
        absent = self._without(now_s, holders)
        urgent, self._absent = urgent or absent != self._absent, absent
        for policy, meter in self.meters.items():
            if meter.end_interval(now_s - self._supplied_s[policy], now_s, num_engines=holders.get(policy, 0)):
                self._supplied_s[policy] = now_s
        readings = [self._reading(policy) for policy in self.meters]
        self.state, self.record = decide(self.rule, self.state, readings, (self.slots,), now_s, urgent=urgent)
        shares = self.record.shares
        self.targets = {policy: shares[policy][0] * size for policy, size in self._group.items()}

    def demand_slots(self, policy: str) -> float:
        """Slots that just keep the learner busy; 0 while unknown, or while the policy can use none."""
        return 0.0 if policy in self._absent else self._demand(policy) or 0.0

    def _demand(self, policy: str) -> float | None:
        """As `demand_slots`, None while unknown. An engine that holds less than its slots needs all of them."""
        meter, size = self.meters[policy], self._group[policy]
        return meter.demand_requests() if meter.full_requests is None else meter.demand_units(size)

    def _without(self, now_s: float, holders: Mapping[str, int]) -> frozenset[str]:
        """Policies that can use no slot: without a worker, or with a silent learner."""
        return frozenset(
            policy for policy, meter in self.meters.items() if not holders.get(policy) or meter.is_silent(now_s)
        )

    def _reading(self, policy: str) -> Reading:
        meter, size = self.meters[policy], self._group[policy]
        demand = self._demand(policy)
        return Reading(
            policy=policy,
            replicas=(self.targets[policy] // size,),
            progress_per_replica=None if demand is None else (size / demand,),
            supply_progress=meter.supply_progress,
            units_per_replica=size,
            floor_replicas=self._floor[policy],
            silent=policy in self._absent,
            switch_s=self.switch_s[policy],
            weight=self._weight[policy],
            learner_tokens_per_s=meter.learner.value(MIN_BUSY_S) or 0.0,
        )
