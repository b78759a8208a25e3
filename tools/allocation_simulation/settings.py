"""Constants of the simulated world: policies, scenarios, random instances."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0
GROUP_SIZE = 8
BATCH_GROUPS = 32
PROMPT_TOKENS = 200
MAX_STALENESS_VERSIONS = 4
MAX_LENGTH_FACTOR = 8.0
MIN_LENGTH_TOKENS = 16.0


@dataclass(frozen=True)
class PolicySpec:
    """Constants of one policy: its engine, its answers, its learner."""

    name: str
    gang_units: int
    """Number of units of one replica."""
    token_s: float
    """Seconds per token of a request that runs alone, less `token_s_per_request`."""
    token_s_per_request: float
    """Seconds per token that every running request adds."""
    slots: int
    kv_tokens: float
    mean_tokens: float
    """Mean length of an answer at the start, in tokens, before the cut at `MAX_LENGTH_FACTOR`."""
    step_s: float
    """Seconds of a step that do not depend on its tokens."""
    step_s_per_mtoken: float
    pause_s: float
    """Seconds that an engine stands still for new weights."""
    wake_s: float
    sleep_s: float
    cold_s: float
    group_sd: float = 0.5
    """Standard deviation of the logarithm of the length between prompts."""
    answer_sd: float = 0.5
    """Standard deviation of the logarithm of the length between answers to one prompt."""
    batch_groups: int = BATCH_GROUPS
    """Number of groups in the batch of one step."""

    def moments(self, multiplier: float) -> tuple[float, float]:
        """Return the first and second moment of an answer's length, which is cut at eight times the mean."""
        variance = self.group_sd**2 + self.answer_sd**2
        sd, mean = math.sqrt(variance), self.mean_tokens * multiplier
        edge = (math.log(MAX_LENGTH_FACTOR) + variance / 2) / sd
        beyond = _normal_above(edge)
        first = 1.0 - _normal_above(edge - sd) + MAX_LENGTH_FACTOR * beyond
        second = math.exp(variance) * (1.0 - _normal_above(edge - 2 * sd)) + MAX_LENGTH_FACTOR**2 * beyond
        return mean * first, mean * mean * second

    def full_requests(self, multiplier: float) -> int:
        """Number of requests that a full replica runs, bounded by its slots and its key-value cache."""
        first, second = self.moments(multiplier)
        fitting = math.floor(self.kv_tokens / (PROMPT_TOKENS + second / (2.0 * first)))
        return max(2, min(self.slots, fitting))

    def demand_units(self, multiplier: float) -> float:
        """Number of units that just keeps the learner busy when nothing is dropped."""
        tokens = self.batch_groups * GROUP_SIZE * self.mean_tokens * multiplier
        busy_s = self.step_s + self.step_s_per_mtoken * tokens / 1e6
        requests = self.full_requests(multiplier)
        rate = requests / (self.token_s + self.token_s_per_request * requests)
        return self.gang_units * (tokens / busy_s) / rate


@dataclass(frozen=True)
class Scenario:
    """A pool of units, the policies that share it, and the events that happen to them, with times in seconds."""

    name: str
    policies: tuple[PolicySpec, ...]
    num_units: int
    horizon_s: float = 8 * HOUR_S
    warmup_s: float = 0.75 * HOUR_S
    growth: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Policy -> (from, to, factor): the lengths of its answers grow in a straight line between these times."""
    outages: tuple[tuple[int, float, float], ...] = ()
    """(unit, from, to): the unit is lost between these times."""
    crashes: tuple[tuple[int, float], ...] = ()
    """(unit, time): the engine on the unit dies, the unit does not."""
    hangs: tuple[tuple[str, float, float], ...] = ()
    """(policy, from, to): the policy's learner stands still between these times."""

    def multiplier(self, policy: str, now_s: float) -> float:
        """Length of the policy's answers relative to the start."""
        if policy not in self.growth:
            return 1.0
        begin_s, end_s, factor = self.growth[policy]
        return 1.0 + (factor - 1.0) * min(1.0, max(0.0, (now_s - begin_s) / (end_s - begin_s)))

    def units_up(self, now_s: float) -> int:
        """Number of units that work."""
        return self.num_units - sum(begin_s <= now_s < end_s for _, begin_s, end_s in self.outages)

    def hangs_at(self, policy: str, now_s: float) -> bool:
        """Whether the learner of the policy stands still."""
        return any(name == policy and begin_s <= now_s < end_s for name, begin_s, end_s in self.hangs)

    def edges_s(self) -> list[float]:
        """Sorted times at which the world changes abruptly or begins or ends to drift."""
        times = [time_s for begin_s, end_s, _ in self.growth.values() for time_s in (begin_s, end_s)]
        times += [time_s for _, begin_s, end_s in (*self.outages, *self.hangs) for time_s in (begin_s, end_s)]
        return sorted(set(times))


A = PolicySpec("A", 1, 0.008, 0.00010, 64, 400e3, 800, 6, 140, 1, 6, 2, 45)
B = PolicySpec("B", 1, 0.016, 0.00025, 64, 300e3, 2000, 10, 120, 2, 12, 3, 80)
C = PolicySpec("C", 1, 0.016, 0.00025, 64, 300e3, 6000, 12, 105, 2, 12, 3, 80)
D = PolicySpec("D", 2, 0.030, 0.00050, 64, 300e3, 1500, 15, 240, 4, 25, 6, 150)

GROWTH = {"C": (1.5 * HOUR_S, 2.0 * HOUR_S, 4.0)}


def scenarios() -> dict[str, Scenario]:
    """Scenarios by name: S0 stationary, S1 growing answers, S2 lost units and engines, S3 hanging learners, S4 all."""
    still = Scenario("S0", (A, B, C, D), 12)
    outage = ((0, 1.5 * HOUR_S, 4.0 * HOUR_S), (1, 1.5 * HOUR_S, 4.0 * HOUR_S))
    late_outage = ((0, 3.0 * HOUR_S, 4.5 * HOUR_S), (1, 3.0 * HOUR_S, 4.5 * HOUR_S))
    found = [
        still,
        replace(still, name="S1", growth=GROWTH),
        replace(still, name="S2", outages=outage, crashes=((5, 2.5 * HOUR_S), (8, 4.75 * HOUR_S))),
        replace(still, name="S3", hangs=(("B", 1.5 * HOUR_S, 2.5 * HOUR_S), ("D", 3.5 * HOUR_S, 4.5 * HOUR_S))),
        replace(
            still,
            name="S4",
            growth=GROWTH,
            outages=late_outage,
            crashes=((5, 2.5 * HOUR_S),),
            hangs=(("B", 3.5 * HOUR_S, 4.25 * HOUR_S),),
        ),
    ]
    return {scenario.name: scenario for scenario in found}


def random_instance(seed: int) -> Scenario:
    """Make a pool of three to six policies; at odd seeds the answers of one of them grow for half an hour."""
    rng = random.Random(seed)
    policies = tuple(random_policy(f"P{index}", rng) for index in range(rng.randint(3, 6)))
    wanted = rng.uniform(0.5, 0.95) * sum(policy.demand_units(1.0) for policy in policies)
    least = sum(policy.gang_units for policy in policies)
    growth = {}
    if seed % 2:
        growth[rng.choice(policies).name] = (2.0 * HOUR_S, 2.5 * HOUR_S, rng.uniform(1.5, 4.0))
    units = min(40, max(least, round(wanted)))
    return Scenario(f"R{seed}", policies, units, horizon_s=6 * HOUR_S, warmup_s=HOUR_S, growth=growth)


def random_policy(name: str, rng: random.Random) -> PolicySpec:
    """Draw the constants of a policy of half a billion to forty billion parameters."""
    size = math.exp(rng.uniform(math.log(0.5), math.log(40.0)))
    gang = 1 if size < 10 else 2 if size < 25 else 4
    return PolicySpec(
        name=name,
        gang_units=gang,
        token_s=0.006 + 0.010 * math.sqrt(size / 7 / gang),
        token_s_per_request=0.00008 + 0.00016 * size / (7 * gang),
        slots=64,
        kv_tokens=300e3 * math.sqrt(gang),
        mean_tokens=math.exp(rng.uniform(math.log(400), math.log(6000))),
        answer_sd=rng.uniform(0.3, 0.7),
        step_s=rng.uniform(4.0, 15.0),
        step_s_per_mtoken=40.0 + 60.0 * (size / 7) ** 0.6 * math.exp(0.4 * rng.gauss(0.0, 1.0)),
        pause_s=0.5 + size / 10,
        wake_s=4.0 + 0.8 * size,
        sleep_s=1.0 + size / 8,
        cold_s=30.0 + 4.0 * size,
    )


def _normal_above(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))
