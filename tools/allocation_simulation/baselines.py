"""Baselines of the allocation controller: splits of the units that a person could set by hand."""

import itertools
from collections.abc import Callable, Iterable, Mapping

from allocation_simulation.settings import Scenario
from allocation_simulation.world import AllocationRule, World

ROUND_S = 60.0
PIECE_S = 300.0


def in_proportion(weights: Mapping[str, float], sizes: Mapping[str, int], units: int) -> dict[str, int]:
    """Divide units into whole replicas by weight: rounded down but at least one, the rest by largest remainder."""
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
    """Allocation rule with a split that never changes."""

    is_static, period_s = True, ROUND_S

    def __init__(self, split: Callable[[Scenario], dict[str, int]]) -> None:
        self._split = split

    def shares(self, world: World, *, urgent: bool) -> Mapping[str, int]:
        """Replicas of each policy, always the same."""
        return self._split(world.scenario)


def equal(scenario: Scenario) -> dict[str, int]:
    """Divide the units equally between the policies."""
    return in_proportion({spec.name: 1.0 for spec in scenario.policies}, _sizes(scenario), scenario.num_units)


def best_fixed(scenario: Scenario) -> dict[str, int]:
    """Return the split that is best in hindsight: the highest least progress of a policy, then the highest sum.

    Progress is computed for fluids: a policy's is the mean of min(1, units / demand) over the time after the warm-up.
    """
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


def rules() -> dict[str, Callable[[], AllocationRule]]:
    """Every baseline by name, made anew for each trial."""
    return {
        "static equal": lambda: Fixed(equal),
        "static best in hindsight": lambda: Fixed(best_fixed),
    }
