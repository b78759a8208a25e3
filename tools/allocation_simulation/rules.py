"""The controller of `mrl.allocation` in the simulated world."""

import time
from collections.abc import Mapping

import msgspec

from allocation_simulation.engine import Replica
from allocation_simulation.learner import SimulatedPolicy
from allocation_simulation.world import World
from mrl.allocation.decision import ControllerState, decide
from mrl.allocation.meter import MeterSettings, PolicyMeter, increments
from mrl.allocation.objective import Reading, Rule
from mrl.allocation.unit_controller import timed_rule
from mrl.config.schema import AllocationTable

GRANT_OVERHEAD_S = 3.0
UNITS = Rule(period_s=60.0)
"""Rule of a run that sets `allocation.period_s` to this period; the rest follows from the seconds of switching."""
SWITCHING_SHARE = AllocationTable().switching_share


class PoolMeters:
    """The meters of all policies by name, fed with the counters of the simulated world."""

    def __init__(self) -> None:
        self.of: dict[str, PolicyMeter] = {}
        self._replica_totals: dict[Replica, tuple[float, ...]] = {}
        self._learner_totals: dict[str, tuple[float, ...]] = {}
        self._delivered: dict[str, float] = {}
        self._measured_s = 0.0

    def measure(self, world: World) -> None:
        """Feed the meters with the increments since the last call, unless that was less than `min_interval_s` ago."""
        interval_s = world.now_s - self._measured_s
        if self.of and interval_s < MeterSettings().min_interval_s:
            return
        self._measured_s = world.now_s
        totals: dict[Replica, tuple[float, ...]] = {}
        for name, policy in world.policies.items():
            meter = self.of.setdefault(name, PolicyMeter(MeterSettings()))
            retired = [replica for replica in world.retired if replica.policy == name]
            for replica in (*policy.replicas, *retired):
                totals[replica] = (replica.active_s, replica.request_s, replica.tokens)
                active_s, request_s, tokens = increments(totals[replica], self._replica_totals.get(replica, (0.0,) * 3))
                meter.add_generated(tokens, request_s, evidence_s=active_s / max(1, len(policy.replicas)))
                engine, running = meter.engine(), len(replica.running)
                if running and (policy.queue or running > (engine.full_requests or 0.0)):
                    engine.full_requests = float(running)  # with requests waiting, these are all that fit
                engine.add_sample(active_s, request_s, tokens, interval_s=interval_s, num_engines=len(policy.replicas))
            self._measure_learner(name, policy, meter)
            (delivered,) = increments((policy.delivered_tokens,), (self._delivered.get(name, 0.0),))
            self._delivered[name] = policy.delivered_tokens
            meter.end_interval(interval_s, world.now_s, num_engines=len(policy.replicas))
            needed = meter.needed_tokens(interval_s)
            if policy.replicas and meter.supply_progress is not None and needed:
                # Workers tell the tokens of complete groups, which leave out what only fills engines.
                meter.supply_progress = delivered / needed
        self._replica_totals = totals

    def _measure_learner(self, name: str, policy: SimulatedPolicy, meter: PolicyMeter) -> None:
        totals = (
            policy.trained_tokens,
            policy.busy_s,
            policy.wait_s,
            float(policy.trained_groups),
            float(policy.dropped_groups),
        )
        meter.add_learner(*increments(totals, self._learner_totals.get(name, (0.0,) * 5)))
        meter.hear(policy.heard_s)
        self._learner_totals[name] = totals


class Controller:
    """Allocation rule made of the allocator's meter and decision and of the learners' admission windows.

    changes: fields of its `Rule` that differ from the timed one.
    """

    is_static = False

    def __init__(self, **changes: float) -> None:
        self._changes = changes
        self.period_s = UNITS.period_s
        self.meters = PoolMeters()
        self._state = ControllerState(decided_s=0.0)
        self._silent: frozenset[str] = frozenset()
        self._waits: dict[str, tuple[float, float]] = {}
        self.took_s: list[float] = []
        """CPU seconds of every decision."""

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """Measure, decide, adjust the admission windows, and return the replicas of each policy."""
        self.meters.measure(world)
        readings = [self._reading(world, policy) for policy in world.policies.values()]
        silent = frozenset(reading.policy for reading in readings if reading.silent)
        changed = silent != self._silent
        self._silent = silent
        switch_s = {reading.policy: reading.switch_s for reading in readings}
        rule = timed_rule(UNITS, switch_s, switching_share=SWITCHING_SHARE)
        rule = msgspec.structs.replace(rule, **self._changes)
        began_s = time.process_time()
        self._state, record = decide(
            rule, self._state, readings, (world.units_up,), world.now_s, urgent=urgent or changed
        )
        self.took_s.append(time.process_time() - began_s)
        if not urgent:
            self._adjust_windows(world)
        return {policy: counts[0] for policy, counts in record.shares.items()}

    def _reading(self, world: World, policy: SimulatedPolicy) -> Reading:
        spec, meter = policy.spec, self.meters.of[policy.spec.name]
        demand = meter.demand_units(spec.gang_units)
        return Reading(
            policy=spec.name,
            replicas=(len(policy.replicas),),
            progress_per_replica=None if demand is None else (spec.gang_units / demand,),
            supply_progress=meter.supply_progress,
            units_per_replica=spec.gang_units,
            silent=meter.is_silent(world.now_s),
            switch_s=spec.wake_s + GRANT_OVERHEAD_S,
            learner_tokens_per_s=meter.learner.value(0.0) or 0.0,
        )

    def _adjust_windows(self, world: World) -> None:
        for name, policy in world.policies.items():
            totals = (policy.wait_shut_s, policy.wait_s)
            shut_s, wait_s = increments(totals, self._waits.get(name, (0.0, 0.0)))
            self._waits[name] = totals
            policy.window.adjust(shut_s, wait_s, self.period_s, num_replicas=len(policy.replicas))
