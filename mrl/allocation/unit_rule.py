"""How many units each policy should have: the controller of slots, with a whole unit in the place of a group.

Moving an engine takes seconds to minutes, and how long is measured; the controller's times follow from it.
"""

from collections.abc import Mapping

import msgspec

from mrl.allocation.decision import DecisionRecord
from mrl.allocation.engine_use import EngineUse
from mrl.allocation.slot_shares import SlotShares
from mrl.allocation.worth import Rule
from mrl.records.leases import LearnerReport

PERIODS_PER_DWELL = 4
DWELLS_PER_WINDOW = 8
NEWEST_SWITCH_WEIGHT = 0.3


class UnitShares:
    """One controller per kind of unit: policies on units of different kinds do not compete."""

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
    ) -> None:
        """`kinds`: policy -> kind of unit that its engine fits; `num_units`: per kind.

        The times of `rule`, but its period, are not used. `switching_share`: part of the time that starting engines
        may take.
        """
        self._per_unit, self._rule, self._switching_share = slots_per_unit, rule, switching_share
        self._released: set[str] = set()
        self._switch_s: dict[str, float] = {}
        self._held: Mapping[str, int] = {}
        self._pools: dict[str, SlotShares] = {}
        for kind in sorted(set(kinds.values())):
            rivals = [policy for policy, other in kinds.items() if other == kind]
            pool = SlotShares(
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

    def add_rollout(self, policy: str, use: EngineUse) -> None:
        """Count what one engine did since it was heard last."""
        self._pools[policy].add_engine(policy, use, self._per_unit, num_engines=max(1, self._held.get(policy, 1)))

    def add_report(self, report: LearnerReport, now_s: float) -> None:
        """Count a learner's totals."""
        self._pools[report.policy].add_learner(report, now_s)

    def add_switch(self, policy: str, switch_s: float) -> None:
        """Count how long it took from a grant to the engine's first word."""
        before = self._switch_s.get(policy, switch_s)
        self._switch_s[policy] = before + NEWEST_SWITCH_WEIGHT * (switch_s - before)

    def release(self, policy: str) -> None:
        """The policy needs no engine any more."""
        self._released.add(policy)

    def targets(
        self, usable: Mapping[str, int], held: Mapping[str, int], starting_s: Mapping[str, float], now_s: float
    ) -> dict[str, int]:
        """Units per policy. `usable`: units that each policy's engine fits; `held`: what each has now.

        `starting_s`: how long a policy's engine has been starting that has not spoken yet. A start takes that long at
        least: where it was never measured, an engine would else lose its unit again and again before it has spoken.
        """
        targets: dict[str, int] = {}
        self._held = held
        for pool in dict.fromkeys(self._pools.values()):
            rivals = [policy for policy, other in self._pools.items() if other is pool]
            slots = usable[rivals[0]] * self._per_unit
            in_transit = usable[rivals[0]] - sum(held[policy] for policy in rivals)
            for policy in rivals:
                # What was decided stands while units are on their way: they belong to nobody until proved quiet.
                promised = max(0, min(in_transit, pool.targets[policy] // self._per_unit - held[policy]))
                in_transit -= promised
                pool.targets[policy] = (held[policy] + promised) * self._per_unit
                pool.switch_s[policy] = max(self._switch_s.get(policy, 0.0), starting_s.get(policy, 0.0))
            urgent, pool.slots, pool.rule = slots != pool.slots, slots, self._timed_rule(pool.switch_s)
            pool.decide(now_s, {policy: int(policy not in self._released) for policy in rivals}, urgent=urgent)
            targets |= {policy: pool.targets[policy] // self._per_unit for policy in rivals}
        return targets

    def records(self) -> list[DecisionRecord]:
        """The newest decision about each kind of unit, with what led to it."""
        pools = dict.fromkeys(self._pools.values())
        return [pool.record for pool in pools if pool.record is not None]

    def demand_units(self, policy: str) -> float:
        """Units that just keep the learner busy; 0 while unknown."""
        return self._pools[policy].demand_slots(policy) / self._per_unit

    def progress(self, policy: str) -> float:
        """Busy share of the learner, 0 while unknown."""
        return self._pools[policy].meters[policy].progress()

    def num_reports(self, policy: str) -> int:
        """Reports of its learner that said something new."""
        return self._pools[policy].num_reports[policy]

    def _timed_rule(self, rivals_switch_s: Mapping[str, float]) -> Rule:
        switch_s = max(rivals_switch_s.values(), default=0.0)
        dwell_s = max(PERIODS_PER_DWELL * self._rule.period_s, switch_s / self._switching_share)
        return msgspec.structs.replace(
            self._rule,
            dwell_s=dwell_s,
            hold_s=dwell_s + switch_s,  # an engine that only started within the horizon would be worth less than none
            window_s=DWELLS_PER_WINDOW * dwell_s,
            max_unserved_s=len(rivals_switch_s) * (dwell_s + switch_s),  # longer than a round of everybody's turns
            moves_per_unit_hour=None,
        )
