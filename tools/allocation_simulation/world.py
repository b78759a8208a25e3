"""The pool in simulated time: units, moves, failures, and accounts of unit time and progress."""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

from allocation_simulation.engine import Replica
from allocation_simulation.learner import SimulatedPolicy
from allocation_simulation.placement import Placed, place
from allocation_simulation.settings import HOUR_S, PolicySpec, Scenario

SAMPLE_S = 5.0
LENGTH_REFRESH_S = 30.0
REWORK_SHARE = 0.02
"""Part of a displaced answer that has to be computed again on its new engine."""


class AllocationRule(Protocol):
    """Decides the number of replicas of each policy. It sees counters, not causes."""

    period_s: float
    is_static: bool
    """Whether engines stay where they are; a lost one starts again on the same units, from cold."""

    def shares(self, world: "World", *, urgent: bool) -> Mapping[str, int]:
        """Return the number of replicas of each policy from now on; `urgent`: a unit or an engine came or went."""


@dataclass
class Accounts:
    """Samples of units that are up, by state; units moved; longest time that each policy was without an engine."""

    idle: int = 0
    switching: int = 0
    total: int = 0
    moved_units: int = 0
    max_wait_unserved_s: dict[str, float] = field(default_factory=dict)


class World:
    """One run of a scenario under a rule. `run` plays it to the horizon."""

    make_policy = SimulatedPolicy

    def __init__(self, scenario: Scenario, rule: AllocationRule, seed: int) -> None:
        self.scenario, self.rule = scenario, rule
        self.now_s = 0.0
        self.down: set[int] = set()
        self.policies = {spec.name: self._policy(spec, seed) for spec in scenario.policies}
        self.retired: list[Replica] = []
        """Replicas stopped since the rule's last decision."""
        self.accounts = Accounts()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._step_ends_s: dict[str, float] = {}
        self._homes: dict[int, Placed] = {}
        self._at_warmup: dict[str, tuple[float, float]] = {}
        self._unserved_from_s: dict[str, float] = {}
        self._plan_scenario()

    @property
    def units_up(self) -> int:
        """Number of units that work."""
        return self.scenario.num_units - len(self.down)

    def run(self) -> "World":
        """Play the scenario to its horizon; return the world."""
        horizon_s, events = self.scenario.horizon_s, self._events
        while events and events[0][0] <= horizon_s:
            self.now_s, _, act = heapq.heappop(events)
            act()
        self.now_s = horizon_s
        for policy in self.policies.values():
            policy.account(horizon_s)
        return self

    def progress(self) -> dict[str, float]:
        """Busy share of every learner since the warm-up; time in which it hung does not count."""
        found = {}
        for name, policy in self.policies.items():
            busy_s, wait_s = self._at_warmup[name]
            busy_s, wait_s = policy.busy_s - busy_s, policy.wait_s - wait_s
            found[name] = busy_s / (busy_s + wait_s) if busy_s else 0.0
        return found

    def _policy(self, spec: PolicySpec, seed: int) -> SimulatedPolicy:
        rng = random.Random(f"{seed} {spec.name}")
        return self.make_policy(spec, rng, lambda duration_s: self._begin_step(spec.name, duration_s))

    # what happens when

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def _every(self, period_s: float, first_s: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._at(self.now_s + period_s, again)

        self._at(first_s, again)

    def _plan_scenario(self) -> None:
        scenario = self.scenario
        self._every(self.rule.period_s, 0.0, self._control)
        self._every(SAMPLE_S, SAMPLE_S, self._sample)
        if scenario.growth:
            self._every(LENGTH_REFRESH_S, LENGTH_REFRESH_S, self._refresh_lengths)
        self._at(scenario.warmup_s, self._end_warmup)
        for unit, begin_s, end_s in scenario.outages:
            self._at(begin_s, partial(self._lose_unit, unit))
            self._at(end_s, partial(self._regain_unit, unit))
        for unit, when_s in scenario.crashes:
            self._at(when_s, partial(self._crash, unit))
        for policy, begin_s, end_s in scenario.hangs:
            self._at(begin_s, partial(self._hang, policy))
            self._at(end_s, partial(self._wake_learner, policy))

    # engines

    def _watch(self, replica: Replica) -> None:
        """Plan the next end of a request on this replica."""
        replica.stamp += 1
        if replica.running:
            stamp = replica.stamp
            self._at(replica.next_end_s(), lambda: self._requests_end(replica, stamp))

    def _requests_end(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        replica.advance(self.now_s)
        policy = self.policies[replica.policy]
        complete = False
        for request in replica.ended():
            complete |= policy.complete(request)
        if complete:
            policy.try_step(self.now_s)
        self._feed(policy, replica)

    def _feed(self, policy: SimulatedPolicy, touched: Replica | None = None) -> None:
        before = {replica: len(replica.running) for replica in policy.replicas}
        policy.admit(self.now_s)
        for replica, running in before.items():
            if replica is touched or len(replica.running) != running:
                self._watch(replica)

    def _start(self, placed: Placed, delay_s: float) -> None:
        policy = self.policies[placed.policy]
        spec = policy.spec
        replica = Replica(
            placed.policy,
            placed.first_unit,
            placed.num_units,
            line=(spec.token_s, spec.token_s_per_request),
            full=spec.full_requests(policy.multiplier),
            serving_from_s=self.now_s + delay_s,
        )
        policy.replicas.append(replica)
        self._at(replica.serving_from_s, lambda: self._feed(policy))

    def _stop(self, replica: Replica, *, keep_tokens: bool) -> None:
        replica.advance(self.now_s)
        replica.stamp += 1
        policy = self.policies[replica.policy]
        policy.replicas.remove(replica)
        self.retired.append(replica)
        policy.queue.extendleft(reversed(replica.evict(keep_tokens=keep_tokens, rework=REWORK_SHARE)))

    # learners

    def _begin_step(self, name: str, duration_s: float) -> None:
        self._plan_step_end(name, self.now_s + duration_s)

    def _plan_step_end(self, name: str, end_s: float) -> None:
        self._step_ends_s[name] = end_s
        self._at(end_s, lambda: self._end_step(name, end_s))

    def _end_step(self, name: str, planned_s: float) -> None:
        policy = self.policies[name]
        if self._step_ends_s.get(name) != planned_s:
            return
        del self._step_ends_s[name]
        policy.end_step(self.now_s)
        for replica in policy.give_up_stale(self.now_s):
            self._watch(replica)
        for replica in policy.replicas:
            if replica.serving_from_s <= self.now_s:
                replica.pause(self.now_s, policy.spec.pause_s)
                self._watch(replica)
        policy.try_step(self.now_s)
        self._feed(policy)

    def _hang(self, name: str) -> None:
        policy = self.policies[name]
        policy.account(self.now_s)
        policy.hanging = True
        if name in self._step_ends_s:
            self._step_ends_s[name] -= self.now_s  # what is left of the step

    def _wake_learner(self, name: str) -> None:
        policy = self.policies[name]
        policy.account(self.now_s)
        policy.hanging = False
        policy.account(self.now_s)
        if name in self._step_ends_s:
            self._plan_step_end(name, self.now_s + self._step_ends_s[name])
        policy.try_step(self.now_s)
        self._feed(policy)

    # failures

    def _replica_on(self, unit: int) -> Replica | None:
        everywhere = (replica for policy in self.policies.values() for replica in policy.replicas)
        return next((replica for replica in everywhere if unit in replica.units), None)

    def _lose_unit(self, unit: int) -> None:
        self.down.add(unit)
        if replica := self._replica_on(unit):
            self._stop(replica, keep_tokens=False)
            self._feed(self.policies[replica.policy])
        if not self.rule.is_static:
            self._control(urgent=True)

    def _regain_unit(self, unit: int) -> None:
        self.down.discard(unit)
        self._restart_or_decide(unit)

    def _crash(self, unit: int) -> None:
        if replica := self._replica_on(unit):
            self._stop(replica, keep_tokens=False)
            self._feed(self.policies[replica.policy])
        self._restart_or_decide(unit)

    def _restart_or_decide(self, unit: int) -> None:
        if not self.rule.is_static:
            self._control(urgent=True)
            return
        home = self._homes.get(unit)
        if home and not self.down.intersection(home.units) and not self._replica_on(unit):
            self._start(home, self.policies[home.policy].spec.cold_s)

    # decisions

    def _control(self, *, urgent: bool = False) -> None:
        for policy in self.policies.values():
            policy.account(self.now_s)
            for replica in policy.replicas:
                replica.advance(max(self.now_s, replica.advanced_s))
        if self.rule.is_static and self._homes:
            return
        wanted = self.rule.shares(self, urgent=urgent)
        self.retired.clear()
        self._move(wanted)
        for policy in self.policies.values():
            self._feed(policy)

    def _move(self, wanted: Mapping[str, int]) -> None:
        replicas = {
            Placed(replica.policy, replica.first_unit, replica.num_units, len(replica.running)): replica
            for policy in self.policies.values()
            for replica in policy.replicas
        }
        moves = place(
            list(replicas),
            wanted,
            {name: policy.spec.gang_units for name, policy in self.policies.items()},
            num_units=self.scenario.num_units,
            down=frozenset(self.down),
        )
        for placed in moves.stopped:
            self._stop(replicas[placed], keep_tokens=True)
        for placed in moves.started:
            displaced = [old for old in moves.stopped if set(old.units).intersection(placed.units)]
            sleep_s = max((self.policies[old.policy].spec.sleep_s for old in displaced), default=0.0)
            self._start(placed, sleep_s + self.policies[placed.policy].spec.wake_s)
            if self.now_s > 0.0:
                self.accounts.moved_units += placed.num_units
            if self.rule.is_static:
                self._homes.update(dict.fromkeys(placed.units, placed))

    # accounts

    def _refresh_lengths(self) -> None:
        for name, policy in self.policies.items():
            multiplier = self.scenario.multiplier(name, self.now_s)
            if multiplier != policy.multiplier:
                policy.multiplier = multiplier
                full = policy.spec.full_requests(multiplier)
                for replica in policy.replicas:
                    replica.full = full

    def _end_warmup(self) -> None:
        for name, policy in self.policies.items():
            policy.account(self.now_s)
            self._at_warmup[name] = (policy.busy_s, policy.wait_s)

    def _sample(self) -> None:
        """Count the units that are up by state: serving, waking up, or idle (unowned, empty, or paused)."""
        accounts, serving = self.accounts, 0
        for name, policy in self.policies.items():
            for replica in policy.replicas:
                if replica.serving_from_s > self.now_s:
                    accounts.switching += replica.num_units
                elif replica.running and replica.worked_s <= self.now_s:
                    serving += replica.num_units
            if policy.replicas or policy.hanging:
                self._unserved_from_s.pop(name, None)
            else:
                unserved_s = self.now_s - self._unserved_from_s.setdefault(name, self.now_s)
                longest = accounts.max_wait_unserved_s
                longest[name] = max(longest.get(name, 0.0), unserved_s)
        accounts.total += self.units_up
        owned = sum(
            replica.num_units
            for policy in self.policies.values()
            for replica in policy.replicas
            if replica.serving_from_s > self.now_s
        )
        accounts.idle += self.units_up - serving - owned


def moves_per_unit_hour(world: World) -> float:
    """Number of units that began to serve another policy, per unit of the pool and hour."""
    return world.accounts.moved_units / world.scenario.num_units / (world.scenario.horizon_s / HOUR_S)
