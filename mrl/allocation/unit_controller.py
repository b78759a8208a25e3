"""The controller of units: how many units of which type each policy should have.

Decisions are those of a controller of slots, with a whole unit in the place of a group. A kind of unit (CPU cores,
GPUs) is what an engine fits. Types of one kind (models of GPU, numbers of cores) differ in speed, for each policy in
its own way; speeds are measured. A switch of a unit to another policy takes seconds to minutes; this is measured too,
and the controller's times follow from it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from mrl.allocation.allocation_limits import DWELLS_PER_WINDOW, NEWEST_SWITCH_WEIGHT, PERIODS_PER_DWELL
from mrl.allocation.decision import DecisionRecord
from mrl.allocation.engine_totals import EngineIncrement
from mrl.allocation.objective import Rule
from mrl.allocation.slot_controller import SlotController
from mrl.records.leases import LearnerReport

UnitsByType = Mapping[str, int]
"""Units of every type."""


def timed_rule(rule: Rule, switch_s: Mapping[str, float], *, switching_share: float) -> Rule:
    """Return the rule with times for units that take seconds to switch.

    No unit spends more than `switching_share` of its time on switching. switch_s: per policy, from a grant to the first
    request of its engine. Of the times of `rule` only the period is used.
    """
    longest_s = max(switch_s.values(), default=0.0)
    dwell_s = max(PERIODS_PER_DWELL * rule.period_s, longest_s / switching_share)
    return msgspec.structs.replace(
        rule,
        dwell_s=dwell_s,
        hold_s=dwell_s + longest_s,  # a start that takes the whole horizon would be worth less than no engine
        window_s=DWELLS_PER_WINDOW * dwell_s,
        max_unserved_s=len(switch_s) * (dwell_s + longest_s),  # longer than one turn of every policy
    )


class UnitController:
    """One controller of slots per kind of unit: policies on units of different kinds do not compete."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        num_units: Mapping[str, int],
        rule: Rule,
        *,
        floor_units: int,
        switching_share: float,
        slots_per_unit: int,
        hung_s: float,
        weights: Mapping[str, float],
        now_s: float,
        switch_s: Mapping[str, float] | None = None,
    ) -> None:
        """kinds: policy -> kind of unit that its engine fits. num_units: units per kind.

        rule: its times, except for the period, are replaced (`timed_rule`). switch_s: per policy, as measured earlier.
        """
        self._per_unit, self._rule, self._switching_share = slots_per_unit, rule, switching_share
        self._released: set[str] = set()
        self.switch_s = dict(switch_s or {})
        """Policy -> seconds from a grant to the first request of its engine, as measured so far."""
        self._held: Mapping[str, UnitsByType] = {}
        self._pools: dict[str, SlotController] = {}
        for kind in sorted(set(kinds.values())):
            rivals = [policy for policy, other in kinds.items() if other == kind]
            pool = SlotController(
                rivals,
                rule,
                slots=num_units[kind] * slots_per_unit,
                floor_slots=floor_units * slots_per_unit,
                silent_s=hung_s,
                group_sizes=dict.fromkeys(rivals, slots_per_unit),
                weights=weights,
                now_s=now_s,
            )
            self._pools |= dict.fromkeys(rivals, pool)

    def add_rollout(self, policy: str, unit_type: str, use: EngineIncrement) -> None:
        """Count the work of one engine on a unit of a type since its last request."""
        num_engines = max(1, self._held.get(policy, {}).get(unit_type, 1))
        self._pools[policy].add_engine(policy, use, self._per_unit, num_engines=num_engines, unit_type=unit_type)

    def add_report(self, report: LearnerReport, now_s: float) -> None:
        """Count a learner's totals."""
        self._pools[report.policy].add_learner(report, now_s)

    def add_switch(self, policy: str, switch_s: float) -> None:
        """Count a switch: the seconds from a grant to the first request of the policy's engine."""
        before = self.switch_s.get(policy, switch_s)
        self.switch_s[policy] = before + NEWEST_SWITCH_WEIGHT * (switch_s - before)

    def release(self, policy: str) -> None:
        """Give no more units to a policy that needs no engine any more."""
        self._released.add(policy)

    def targets(
        self,
        usable: Mapping[str, UnitsByType],
        held: Mapping[str, UnitsByType],
        starting_s: Mapping[str, float],
        now_s: float,
    ) -> dict[str, dict[str, int]]:
        """Return the units per policy and type.

        usable: units that the policy's engine fits. held: units that the policy has now.
        starting_s: age of the policy's oldest start without a first request. A switch takes at least that long: where
        no switch was measured, an engine would else lose its unit again and again before its first request.
        """
        targets: dict[str, dict[str, int]] = {}
        self._held = held
        for pool in dict.fromkeys(self._pools.values()):
            rivals = [policy for policy, other in self._pools.items() if other is pool]
            units = {kind: max(usable[policy].get(kind, 0) for policy in rivals)
                     for kind in sorted({kind for policy in rivals for kind in usable[policy]})}  # fmt: skip
            capacity = {kind: count * self._per_unit for kind, count in units.items()}
            pool.unfit = {policy: frozenset(units.keys() - usable[policy].keys()) for policy in rivals}
            for policy in rivals:
                pool.switch_s[policy] = max(self.switch_s.get(policy, 0.0), starting_s.get(policy, 0.0))
            pool.shares = self._promised(pool, rivals, units, held)
            # A unit came, went, or showed its type: the split before may break a floor or the new capacity.
            urgent, pool.capacity = capacity != pool.capacity, capacity
            pool.rule = timed_rule(self._rule, pool.switch_s, switching_share=self._switching_share)
            pool.decide(now_s, {policy: int(policy not in self._released) for policy in rivals}, urgent=urgent)
            targets |= {policy: self._in_units(pool.shares[policy]) for policy in rivals}
        return targets

    def records(self) -> list[DecisionRecord]:
        """Return the newest decision about each kind of unit, with its inputs."""
        pools = dict.fromkeys(self._pools.values())
        return [pool.record for pool in pools if pool.record is not None]

    def demand_units(self, policy: str) -> float:
        """Return the units that just keep the learner busy; 0 while unknown."""
        return self._pools[policy].demand_slots(policy) / self._per_unit

    def progress(self, policy: str) -> float:
        """Return the busy share of the learner; 0 while unknown."""
        return self._pools[policy].meters[policy].progress()

    def tokens_per_s(self, policy: str, unit_type: str) -> float:
        """Return the tokens per second of a full engine of a policy on a unit of a type; 0 while unknown."""
        return self._pools[policy].tokens_per_s(policy, unit_type)

    def num_reports(self, policy: str) -> int:
        """Return the number of the learner's reports that said something new."""
        return self._pools[policy].num_reports[policy]

    def _promised(
        self, pool: SlotController, rivals: Sequence[str], usable: UnitsByType, held: Mapping[str, UnitsByType]
    ) -> dict[str, dict[str, int]]:
        """Return the slots that policies hold, with slots decided for them whose units are still on their way.

        A unit on its way belongs to no policy until it is proved quiet.
        """
        shares: dict[str, dict[str, int]] = {policy: {} for policy in rivals}
        for kind, count in usable.items():
            in_transit = count - sum(held[policy].get(kind, 0) for policy in rivals)
            for policy in rivals:
                own = held[policy].get(kind, 0)
                decided = pool.shares[policy].get(kind, 0) // self._per_unit
                promised = max(0, min(in_transit, decided - own))
                in_transit -= promised
                shares[policy][kind] = (own + promised) * self._per_unit
        return shares

    def _in_units(self, slots: Mapping[str, int]) -> dict[str, int]:
        return {kind: count // self._per_unit for kind, count in slots.items()}
