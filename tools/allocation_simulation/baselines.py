"""What the controller is compared with: fixed splits, and rules found elsewhere, in their own short code."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from allocation_simulation.rules import PoolMeters
from allocation_simulation.settings import Scenario
from allocation_simulation.world import AllocationRule, World

ROUND_S = 60.0
BUFFER_LEAD_BATCHES = 0.5
RECEIVED_MEMORY_S = 3600.0
PIECE_S = 300.0


def in_proportion(weights: Mapping[str, float], sizes: Mapping[str, int], units: int) -> dict[str, int]:
    """Whole replicas by weight: rounded down but at least one, then by largest remainder."""
    total = sum(weights.values()) or 1.0
    quota = {name: units * weight / total / sizes[name] for name, weight in weights.items()}
    counts = {name: max(1, int(share)) for name, share in quota.items()}
    left = units - sum(counts[name] * sizes[name] for name in counts)
    while left < 0:
        name = max(counts, key=lambda one: (counts[one] > 1, counts[one] - quota[one]))
        counts[name] -= 1
        left += sizes[name]
    for name in sorted(quota, key=lambda one: counts[one] - quota[one]):
        if sizes[name] <= left:
            counts[name] += 1
            left -= sizes[name]
    return counts


def _sizes(scenario: Scenario) -> dict[str, int]:
    return {spec.name: spec.gang_units for spec in scenario.policies}


class Fixed:
    """A split that never changes."""

    is_static, period_s = True, ROUND_S

    def __init__(self, split: Callable[[Scenario], dict[str, int]]) -> None:
        self._split = split

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """Always the same."""
        return self._split(world.scenario)


def equal(scenario: Scenario) -> dict[str, int]:
    """As many units for everybody."""
    return in_proportion({spec.name: 1.0 for spec in scenario.policies}, _sizes(scenario), scenario.num_units)


def best_fixed(scenario: Scenario) -> dict[str, int]:
    """The best in hindsight: of all splits the one with the highest least progress, then the highest sum, as fluids."""
    specs, units = scenario.policies, scenario.num_units
    middles = [begin + PIECE_S / 2 for begin in _steps(scenario.warmup_s, scenario.horizon_s)]
    fed: list[list[float]] = []
    for spec in specs:
        demands = [spec.demand_units(scenario.multiplier(spec.name, now_s)) for now_s in middles]
        most = units // spec.gang_units
        fed.append([sum(min(1.0, count * spec.gang_units / demand) for demand in demands) for count in range(most + 1)])
    splits = (
        counts
        for counts in itertools.product(*(range(1, len(row)) for row in fed))
        if sum(count * spec.gang_units for count, spec in zip(counts, specs, strict=True)) <= units
    )

    def worth(counts: Iterable[int]) -> tuple[float, float]:
        reached = [row[count] for row, count in zip(fed, counts, strict=True)]
        return min(reached), sum(reached)

    return dict(zip(_sizes(scenario), max(splits, key=worth), strict=True))


def _steps(begin_s: float, end_s: float) -> list[float]:
    return [begin_s + index * PIECE_S for index in range(int((end_s - begin_s) / PIECE_S))]


class GreedyThroughput:
    """Who generates more gets more."""

    is_static, period_s = False, ROUND_S

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._retired: dict[str, float] = {}

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """In proportion to a smoothed count of generated tokens."""
        for replica in world.retired:
            self._retired[replica.policy] = self._retired.get(replica.policy, 0.0) + replica.tokens
        for name, policy in world.policies.items():
            total = self._retired.get(name, 0.0) + sum(replica.tokens for replica in policy.replicas)
            if not urgent:
                made = total - self._totals.get(name, 0.0)
                self._rates[name] = 0.8 * self._rates.get(name, made) + 0.2 * made
                self._totals[name] = total
        weights = {name: max(self._rates.get(name, 0.0), 1.0) for name in world.policies}
        if world.now_s < 10 * ROUND_S:
            return in_proportion(dict.fromkeys(weights, 1.0), _sizes(world.scenario), world.units_up)
        return in_proportion(weights, _sizes(world.scenario), world.units_up)


class BufferThreshold:
    """One replica at a time goes from full buffers to the emptiest one."""

    is_static, period_s = False, ROUND_S

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """Take from those whose buffer is half a batch fuller than the emptiest, fullest first."""
        sizes = _sizes(world.scenario)
        counts = {name: len(policy.replicas) for name, policy in world.policies.items()}
        if not any(counts.values()):
            return in_proportion(dict.fromkeys(counts, 1.0), sizes, world.units_up)
        stock = {name: len(policy.buffer) / policy.spec.batch_groups for name, policy in world.policies.items()}
        needy = min(stock, key=lambda name: (stock[name], name))
        free = world.units_up - sum(counts[name] * sizes[name] for name in counts)
        taken = dict(counts)
        for name in sorted(stock, key=lambda one: -stock[one]):
            while free < sizes[needy] and taken[name] > 1 and stock[name] >= stock[needy] + BUFFER_LEAD_BATCHES:
                taken[name] -= 1
                free += sizes[name]
        if free < sizes[needy]:
            return counts
        taken[needy] += 1
        return taken


class WaterFilling:
    """Progressive filling of measured demands in whole replicas, each round anew."""

    is_static, period_s = False, ROUND_S

    def __init__(self) -> None:
        self._meters = PoolMeters()

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """The next replica goes to whoever is fed least."""
        self._meters.measure(world)
        sizes, demands = _sizes(world.scenario), _demands(world, self._meters)
        if demands is None:
            return in_proportion(dict.fromkeys(sizes, 1.0), sizes, world.units_up)
        counts, left = dict.fromkeys(sizes, 0), world.units_up
        while True:
            fed = {name: counts[name] * sizes[name] / demand for name, demand in demands.items() if demand > 0.0}
            open_to = [name for name, share in fed.items() if share < 1.0 and sizes[name] <= left]
            if not open_to:
                return counts
            name = min(open_to, key=lambda one: (fed[one], one))
            counts[name] += 1
            left -= sizes[name]


class GavelLike:
    """Max-min shares of measured demands, reached in rounds: priority is the share due over what was received."""

    is_static = False

    def __init__(self, round_s: float) -> None:
        self.period_s = round_s
        self._meters = PoolMeters()
        self._received: dict[str, float] = {}
        self._decided_s = 0.0

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """Whole shares by priority, then what is left by priority."""
        self._meters.measure(world)
        sizes, demands = _sizes(world.scenario), _demands(world, self._meters)
        elapsed_s, self._decided_s = world.now_s - self._decided_s, world.now_s
        keep = math.exp(-elapsed_s / RECEIVED_MEMORY_S)
        for name, policy in world.policies.items():
            held = len(policy.replicas) * sizes[name]
            self._received[name] = keep * self._received.get(name, 0.0) + (1.0 - keep) * held
        if demands is None:
            return in_proportion(dict.fromkeys(sizes, 1.0), sizes, world.units_up)
        theta = min(1.0, world.units_up / max(sum(demands.values()), 1e-9))
        due = {name: theta * demand for name, demand in demands.items()}
        order = sorted(due, key=lambda name: -due[name] / max(self._received[name], 1e-6))
        counts, left = dict.fromkeys(sizes, 0), world.units_up
        for name in order:
            counts[name] = min(math.ceil(due[name] / sizes[name]), left // sizes[name])
            left -= counts[name] * sizes[name]
        for name in order:
            if due[name] > 0.0 and sizes[name] <= left:
                counts[name] += 1
                left -= sizes[name]
        return counts


def _demands(world: World, meters: PoolMeters) -> dict[str, float] | None:
    """Measured demands, 0 where the learner hangs; None until all are known."""
    found = {}
    for name, policy in world.policies.items():
        meter = meters.of[name]
        demand = 0.0 if meter.is_silent(world.now_s) else meter.demand_units(policy.spec.gang_units)
        if demand is None:
            return None
        found[name] = demand
    return found


def rules() -> dict[str, Callable[[], AllocationRule]]:
    """Every baseline by name, made anew for each trial."""
    return {
        "static equal": lambda: Fixed(equal),
        "static best in hindsight": lambda: Fixed(best_fixed),
        "greedy throughput": GreedyThroughput,
        "buffer threshold": BufferThreshold,
        "water-filling, instant": WaterFilling,
        "Gavel-like, 60 s": lambda: GavelLike(60.0),
        "Gavel-like, 360 s": lambda: GavelLike(360.0),
    }
