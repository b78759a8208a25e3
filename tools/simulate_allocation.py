#!/usr/bin/env python3
"""Simulation of the allocator, for those who rely on it or change it: its real controller in simulated time.

    .venv/bin/python tools/simulate_allocation.py [--quick] [--scenarios S0 ...] [--seeds N] [--first-seed N]
        [--rules NAME ...] [--rule-seeds N] [--random N] [--large POLICIES UNITS] [--hours N]

It shows how near the controller brings the slowest policy to the optimum.
Real are the meter and the decision of `mrl.allocation` and the admission window of the learner. Simulated are the
placement, engines (processor sharing with a latency line, key-value cache, pauses for new weights), answers with long
tails that share a prompt's difficulty, learners, seconds of switching, lost units, crashed engines and learners that
hang. No number comes from an accelerator: times of switching are assumptions within what is published.

Four policies (1.5, 7, 8 and 32 billion parameters) share 12 units for eight hours:
S0 nothing changes; S1 answers of C grow fourfold within half an hour; S2 two units are lost and come back, two engines
crash; S3 two learners hang for an hour each; S4 all of it. Random instances: three to six policies, up to 40 units.
With --large, also --hours of a pool of any size in which answers grow, nodes are lost, engines crash and learners
hang, simulated answer by answer; 256 units take 15 s of one core, and the time grows as the units do.

ratio       progress of the slowest policy (busy share of its learner after the warm-up) over the clairvoyant optimum of
            a linear programme that knows the future and pays for nothing; worst of all seeds
moves       units that began to serve another policy, per unit and hour
idle, switching   shares of unit time; lag: staleness of groups trained on; dropped: share of groups too stale for it
unserved    longest time that a policy whose learner works had no engine

Exit code 1 when a required bound is missed. Ends with one line of JSON.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import fmean

from allocation_simulation.bound import bound
from allocation_simulation.large import LargeWorld, large_instance
from allocation_simulation.outcomes import CONTROLLER, Trial, rules, try_all, try_rule
from allocation_simulation.settings import MAX_STALENESS_VERSIONS, random_instance, scenarios
from bench_row import Row, end
from rich import box
from rich.console import Console
from rich.table import Table

MIN_RATIO, MIN_MEAN_RATIO = 0.86, 0.89
MIN_RANDOM_RATIO, MIN_RANDOM_MEAN = 0.75, 0.89
MAX_MOVES = 1.0
MAX_DECIDE_MS = 1000.0
FIRST_SEED, FIRST_INSTANCE = 1001, 1000
COLUMNS = (
    "scenario", "rule", "seeds", "ratio", "worst", "least", "mean", "moves", "idle %", "switching %", "lag", "max",
    "dropped %", "unserved s",
)  # fmt: skip


def rows_of(trials: Sequence[Trial], random: Sequence[Trial]) -> Iterator[Row]:
    """Rows of the bounds of the controller, and of the other rules' least progress."""
    own = [trial for trial in trials if trial.rule == CONTROLLER]
    names = list(dict.fromkeys(trial.scenario for trial in own))
    optimum = "clairvoyant LP"
    for name in names:
        ratios = [trial.ratio for trial in own if trial.scenario == name]
        title = f"{name}: least progress, mean of {len(ratios)} seeds"
        yield Row(title, fmean(ratios), "share", optimum, fmean(ratios), f">={MIN_RATIO}")
        yield Row(f"{name}: least progress, worst seed", min(ratios), "share", optimum, min(ratios))
    if own:
        mean = fmean(trial.ratio for trial in own)
        yield Row("least progress, mean over scenarios", mean, "share", optimum, mean, f">={MIN_MEAN_RATIO}")
    if random:
        ratios = [trial.ratio for trial in random]
        title = f"random instances: least progress, mean of {len(ratios)}"
        yield Row(title, fmean(ratios), "share", optimum, fmean(ratios), f">={MIN_RANDOM_MEAN}")
        yield Row("random instances: least progress, worst", min(ratios), "share", optimum, min(ratios),
                  f">={MIN_RANDOM_RATIO}")  # fmt: skip
    if own:
        moves = max(fmean(one.moves_per_unit_hour for one in own if one.scenario == name) for name in names)
        yield Row("moves per unit and hour, worst scenario", moves, "moves", f"{MAX_MOVES:g}", moves, f"<={MAX_MOVES}")
    if everything := [*own, *random]:
        lag = max(trial.max_lag for trial in everything)
        bound = f"eta = {MAX_STALENESS_VERSIONS}"
        yield Row("largest lag", lag, "versions", bound, lag / MAX_STALENESS_VERSIONS, "<=1")
    for rule in dict.fromkeys(trial.rule for trial in trials):
        if rule != CONTROLLER:
            ratio = fmean(trial.ratio for trial in trials if trial.rule == rule)
            yield Row(f"{rule}: least progress, mean over scenarios", ratio, "share", optimum, ratio)


def large_trial(num_policies: int, num_units: int, seed: int, *, hours: float) -> tuple[Trial, list[Row]]:
    """Try the controller in a large world, answer by answer; return the trial and its rows."""
    scenario = large_instance(num_policies, num_units, seed, hours=hours)
    best = bound(scenario)
    trial = try_rule(scenario, CONTROLLER, seed, least_bound=best.least_progress, world_type=LargeWorld)
    title = f"{num_policies} policies, {num_units} units, answer by answer"
    optimum = f"clairvoyant LP {best.least_progress:.3f}"
    myopic = trial.least_progress / best.myopic
    share = trial.decide_ms / MAX_DECIDE_MS
    rows = [
        Row(f"{title}: least progress", trial.ratio, "share", optimum, trial.ratio),
        Row(f"{title}: the same", myopic, "share", f"LP of each moment {best.myopic:.3f}", myopic),
        Row(f"{title}: moves per unit and hour", trial.moves_per_unit_hour, "moves", f"{MAX_MOVES:g}",
            trial.moves_per_unit_hour, f"<={MAX_MOVES}"),
        Row(f"{title}: one decision", trial.decide_ms, "ms", f"{MAX_DECIDE_MS:g} ms", share, "<=1"),
    ]  # fmt: skip
    return trial, rows


def print_table(trials: Sequence[Trial]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("scenario", "rule") else "right")
    for scenario, rule in dict.fromkeys((trial.scenario, trial.rule) for trial in trials):
        table.add_row(*cells_of([one for one in trials if (one.scenario, one.rule) == (scenario, rule)]))
    Console(width=160).print(table)


def cells_of(trials: Sequence[Trial]) -> list[str]:
    def mean(name: str) -> float:
        return fmean(getattr(trial, name) for trial in trials)

    return [
        trials[0].scenario, trials[0].rule, str(len(trials)),
        f"{mean('ratio'):.3f}", f"{min(trial.ratio for trial in trials):.3f}",
        f"{mean('least_progress'):.3f}", f"{mean('mean_progress'):.3f}", f"{mean('moves_per_unit_hour'):.2f}",
        f"{mean('idle_share'):.1%}", f"{mean('switching_share'):.1%}",
        f"{mean('mean_lag'):.2f}", str(max(trial.max_lag for trial in trials)), f"{mean('dropped_share'):.1%}",
        f"{max(trial.longest_unserved_s for trial in trials):.0f}",
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The allocator in simulated time.")
    known, names = list(scenarios()), list(rules())
    parser.add_argument("--quick", action="store_true", help="one seed, the controller and one other, two instances")
    parser.add_argument("--scenarios", nargs="*", choices=known, default=known, metavar="NAME", help=" ".join(known))
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the controller (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--rules", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rule-seeds", type=int, default=2, help="seeds of every other rule (default: %(default)s)")
    parser.add_argument("--random", type=int, default=24, metavar="N", help="random instances (default: %(default)s)")
    parser.add_argument("--large", type=int, nargs=2, metavar=("POLICIES", "UNITS"), help="(default: none)")
    parser.add_argument("--hours", type=float, default=3.0, help="hours of the large pool (default: %(default)s)")
    found = parser.parse_args()
    if found.quick:
        found.seeds, found.rule_seeds, found.random = 1, 1, 2
        found.rules = [CONTROLLER, "static equal"]
    if found.large and (found.large[0] < 1 or found.large[1] < 4 * found.large[0]):
        parser.error("--large: at least 1 policy, and 4 units for each")
    if found.hours < 1.0:
        parser.error("--hours: at least 1")
    if min(found.seeds, found.rule_seeds) < 1 or found.random < 0:
        parser.error("--seeds and --rule-seeds: at least 1; --random: at least 0")
    return found


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    asked = arguments()
    began_s = time.process_time()
    worlds = [scenarios()[name] for name in asked.scenarios]
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    others = [name for name in asked.rules if name != CONTROLLER]
    trials = try_all(worlds, [CONTROLLER], seeds, say) if CONTROLLER in asked.rules else []
    random = try_all(
        (random_instance(FIRST_INSTANCE + k) for k in range(asked.random)), [CONTROLLER], [asked.first_seed], say
    )
    if others:
        trials += try_all(worlds, others, seeds[: asked.rule_seeds], say)
    policies, units = asked.large or (0, 0)
    large, large_rows = large_trial(policies, units, asked.first_seed, hours=asked.hours) if units else (None, [])
    print_table([*trials, *random, *([large] if large else [])])
    rows = [*rows_of(trials, random), *large_rows]
    say(f"{time.process_time() - began_s:.0f} s of CPU time in all")
    for row in rows:
        if not row.ok:
            say(f"MISSED: {row.name} is {row.value:.4g} {row.unit}, required {row.required} of {row.against}")
    return end("allocation", rows)


if __name__ == "__main__":
    sys.exit(main())
