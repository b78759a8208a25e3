"""Trials of allocation rules in scenarios over seeds, with their figures."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from allocation_simulation import baselines
from allocation_simulation.bound import bound
from allocation_simulation.rules import Controller
from allocation_simulation.settings import Scenario
from allocation_simulation.world import AllocationRule, World, moves_per_unit_hour

CONTROLLER = "controller"


def rules() -> dict[str, Callable[[], AllocationRule]]:
    """Every allocation rule by name, made anew for each trial; the controller comes first."""
    return {
        CONTROLLER: Controller,
        **baselines.rules(),
    }


@dataclass(frozen=True)
class Trial:
    """Figures of one run of a scenario under a rule."""

    scenario: str
    rule: str
    seed: int
    ratio: float
    """Least progress of a policy, divided by the clairvoyant bound."""
    least_progress: float
    mean_progress: float
    moves_per_unit_hour: float
    idle_share: float
    switching_share: float
    max_lag: int
    mean_lag: float
    dropped_share: float
    longest_unserved_s: float
    took_s: float
    decide_ms: float
    """Mean CPU time of a decision of the controller; 0 under other rules."""


def try_rule(scenario: Scenario, rule: str, seed: int, *, least_bound: float, world_type: type[World] = World) -> Trial:
    """Run one trial and return its figures."""
    began_s, decides = time.process_time(), rules()[rule]()
    world = world_type(scenario, decides, seed).run()
    progress = world.progress()
    lags = [(lag, count) for policy in world.policies.values() for lag, count in policy.lags.items()]
    trained = sum(count for _, count in lags)
    dropped = sum(policy.dropped_groups for policy in world.policies.values())
    accounts = world.accounts
    return Trial(
        scenario=scenario.name,
        rule=rule,
        seed=seed,
        ratio=min(progress.values()) / least_bound,
        least_progress=min(progress.values()),
        mean_progress=fmean(progress.values()),
        moves_per_unit_hour=moves_per_unit_hour(world),
        idle_share=accounts.idle / accounts.total,
        switching_share=accounts.switching / accounts.total,
        max_lag=max((lag for lag, _ in lags), default=0),
        mean_lag=sum(lag * count for lag, count in lags) / max(1, trained),
        dropped_share=dropped / max(1, dropped + trained),
        longest_unserved_s=max(accounts.max_wait_unserved_s.values(), default=0.0),
        took_s=time.process_time() - began_s,
        decide_ms=1e3 * fmean(decides.took_s) if isinstance(decides, Controller) else 0.0,
    )


def try_all(
    scenarios: Iterable[Scenario], names: Sequence[str], seeds: Sequence[int], say: Callable[[str], None]
) -> list[Trial]:
    """Run the named rules in all scenarios under all seeds, and report each through `say`."""
    found = []
    for scenario in scenarios:
        best = bound(scenario)
        say(
            f"{scenario.name}: {len(scenario.policies)} policies, {scenario.num_units} units; "
            f"clairvoyant least progress {best.least_progress:.3f}, "
            f"myopic {best.myopic:.3f}"
        )
        for name in names:
            trials = [try_rule(scenario, name, seed, least_bound=best.least_progress) for seed in seeds]
            found += trials
            say(
                f"  {name:30} ratio {fmean(one.ratio for one in trials):.3f} "
                f"worst {min(one.ratio for one in trials):.3f}  {fmean(one.took_s for one in trials):.1f} s per trial"
            )
    return found
