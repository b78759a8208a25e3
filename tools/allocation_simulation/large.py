"""The simulated world for thousands of units: a request finds its replica without a look at all replicas.

In `World` every end of an answer brings all replicas of its policy up to now, which makes its numbers, to the last
digit, those of earlier runs; with a hundred replicas that is nearly all of the time. Here a replica is touched only
when its requests change. The behaviour is the same: an answer that ends frees a place, and a request goes to the
replica that runs fewest.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import replace

from allocation_simulation.engine import Replica
from allocation_simulation.learner import SimulatedPolicy
from allocation_simulation.settings import HOUR_S, PolicySpec, Scenario, random_policy
from allocation_simulation.world import World

DEMAND_OVER_UNITS = 1 / 0.75
SD_OF_LOG_DEMAND = 1.0
LEAST_BATCH_GROUPS = 8
NODE_UNITS = 8
MEAN_TOKENS = (1500.0, 8000.0)


class LargePolicy(SimulatedPolicy):
    """Policy that keeps its replicas with room in a heap, ordered by the number of requests that they run."""

    def __init__(self, spec: PolicySpec, rng: random.Random, start_step: Callable[[float], None]) -> None:
        super().__init__(spec, rng, start_step)
        self._room: list[tuple[int, int, Replica]] = []

    def admit_to(self, now_s: float, touched: Replica | None) -> list[Replica]:
        """Fill the replicas as `admit` does, and return those whose requests changed.

        `touched`: the only replica that has changed since the last call, also among those returned; None: any may have.
        """
        offered = [touched] if touched else [one for one in self.replicas if one.serving_from_s <= now_s]
        if touched is None:
            self._room = []
        for replica in offered:
            self._offer(replica)
        changed, shut = dict.fromkeys([touched] if touched else ()), False
        while self._room:
            load, _, found = self._room[0]
            if load != len(found.running) or load >= found.full:
                heapq.heappop(self._room)
                continue
            if not self.queue and not self._let_in():
                shut = True
                break
            heapq.heappop(self._room)
            found.advance(now_s)
            found.add(self.queue.popleft())
            self._offer(found)
            changed[found] = None
        if shut != self._is_shut:
            self.account(now_s)
            self._is_shut = shut
        return list(changed)

    def _offer(self, replica: Replica) -> None:
        if len(replica.running) < replica.full:
            heapq.heappush(self._room, (len(replica.running), replica.first_unit, replica))


class LargeWorld(World):
    """World for many replicas: it plans events only for replicas whose requests changed."""

    make_policy = LargePolicy

    def _feed(self, policy: SimulatedPolicy, touched: Replica | None = None) -> None:
        assert isinstance(policy, LargePolicy)
        for replica in policy.admit_to(self.now_s, touched):
            self._watch(replica)


def large_instance(num_policies: int, num_units: int, seed: int, *, hours: float = 3.0) -> Scenario:
    """Make a scenario whose policies' demands span two orders of magnitude and exceed the units by a third.

    Each is a policy of the random instances with a learner and a batch so many times larger that its demand comes out
    as drawn. Answers of one policy in eight grow, two- to fourfold; one in 64 of the nodes of eight units is lost for
    an hour; one engine in 256 crashes; one learner in sixteen hangs for half an hour.
    """
    rng = random.Random(seed)
    raw = [math.exp(rng.gauss(0.0, SD_OF_LOG_DEMAND)) for _ in range(num_policies)]
    wanted = [one * num_units * DEMAND_OVER_UNITS / sum(raw) for one in raw]
    policies = tuple(_sized(f"P{index:02}", rng, demand) for index, demand in enumerate(wanted))
    horizon_s, warmup_s = hours * HOUR_S, hours * HOUR_S / 4

    def moment() -> float:
        return rng.uniform(warmup_s, horizon_s - HOUR_S / 2)

    names = [policy.name for policy in policies]
    growth = {}
    for name in rng.sample(names, max(1, num_policies // 8)):
        begin_s = moment()
        growth[name] = (begin_s, begin_s + HOUR_S / 2, rng.uniform(2.0, 4.0))
    outages = []
    for node in rng.sample(range(num_units // NODE_UNITS), max(1, num_units // NODE_UNITS // 64)):
        begin_s = moment()
        outages += [(node * NODE_UNITS + unit, begin_s, begin_s + HOUR_S) for unit in range(NODE_UNITS)]
    crashes = tuple((rng.randrange(num_units), moment()) for _ in range(num_units // 256))
    hangs = []
    for name in rng.sample(names, max(1, num_policies // 16)):
        begin_s = moment()
        hangs.append((name, begin_s, begin_s + HOUR_S / 2))
    return Scenario(
        f"L{num_policies}x{num_units}", policies, num_units, horizon_s, warmup_s, growth, tuple(outages), crashes,
        tuple(hangs),
    )  # fmt: skip


def _sized(name: str, rng: random.Random, demand_units: float) -> PolicySpec:
    spec = random_policy(name, rng)
    spec = replace(spec, mean_tokens=math.exp(rng.uniform(*map(math.log, MEAN_TOKENS))))
    factor = max(0.75 * spec.gang_units, demand_units) / spec.demand_units(1.0)
    batch_groups = max(LEAST_BATCH_GROUPS, round(spec.batch_groups * factor))
    return replace(spec, batch_groups=batch_groups, step_s_per_mtoken=spec.step_s_per_mtoken / factor)
