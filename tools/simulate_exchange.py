#!/usr/bin/env python3
"""How the exchange behaves as it grows: its real core and real clients in simulated time, 10 to 1,000 policies,
1,000 to 100,000 records/s, on one daemon, on shards, and on several sites.

    .venv/bin/python tools/simulate_exchange.py [--quick] [--only rates|policies|shards|sites] [--out FILE.png]
        [--budget-mib N] [--seed N] [--put-us X] [--deliver-us X] [--ask-us X] ...

Every policy goes over the same prompts from its own place, publishes 16 successes of 1 KB at a time, asks for the 4
prompts that failed beside them (up to 4 records, watched until they come), and announces a version every 32 successes.
Real are every decision of every daemon (`ExchangeCore`), the clients (`ExchangeClient`, `ShardedExchange`), and every
message with its bytes. Numbers are the processor of a daemon (one core: so much per message, record, prompt), the disk
(group commit), and the network (a delay, no loss, no limit of bandwidth); segments of the log are not simulated. The
numbers are those of the machine on which the exchange was measured; `core us` says what the core alone took here.
The higher the rate, the fewer seconds are simulated; the first quarter fills the memory and is not counted. A daemon's
budget is an eighth of what is usual, so that it is reached within these seconds where one daemon holds everything.

stored/s        records that logs took of the policies themselves
delivered/s     records that arrived at policies
held MiB        what a daemon's records weigh as its budget counts it: median, and highest of any daemon
latency ms      from publishing to arrival, of what arrived for somebody who was waiting for it: p50, p99
age             of what was delivered, in versions of its source: mean, p99
evicted, lost   before their time, to keep the budget; refused or dropped, copies sent again not counted
busy, behind    the busiest daemon's processor; seconds of work that it has not got to at the end
WAN MiB/s       between sites
stat ms         processor time of one daemon's account of itself, measured here

Sites. Policies on several sites can all use the daemons of one of them ("central"): nothing else is needed, and every
message of the others crosses the wide network. Or every site has its own daemons and a forwarder ("forwarded"): a
process that is a client of both sides, made of the same clients as everybody else (mrl starts none: it is simulated
here). It reads the policies of its own site as one stream, and publishes what comes at the other sites, as each of
these policies: it holds their keys and no others, so a site can speak for its own policies only, and it passes on
nothing that came from elsewhere, so nothing goes in a circle. The same prompt lives on the same shard at every site.
Versions go along with the records. A site that is cut off goes on with what it has, and the forwarder's clients send
again what was not acknowledged, up to their bound. One that is started again reads on after what it committed (not
simulated); what it publishes twice is recognised by its ids. Requests and scores have one addressee, and a forwarder
leaves them alone: policies that score each other use one site.

Exit code 1 when a required bound is missed. Ends with one line of JSON.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from bench_row import Row
from exchange_simulation import settings
from exchange_simulation.picture import draw
from exchange_simulation.station import Costs
from exchange_simulation.trial import Outcome, Setting, simulate
from rich import box
from rich.console import Console
from rich.table import Table

SWEEPS = {
    "rates": settings.rates,
    "policies": settings.policies,
    "shards": settings.shards,
    "sites": settings.sites,
}
MAX_P99_MS = 100.0
MAX_BUSY = 0.8
COLUMNS = (
    "policies", "sites", "daemons", "s", "offered/s", "stored/s", "delivered/s", "held MiB", "max", "latency ms", "p99",
    "age", "p99", "evicted", "lost", "busy", "behind s", "WAN MiB/s", "stat ms",
)  # fmt: skip


def bounded(outcome: Outcome, name: str, value: float, unit: str, at_most: float) -> Row:
    """A figure that must not exceed `at_most`."""
    ratio = None if math.isnan(value) else value / at_most
    return Row(f"{outcome.setting.title}: {name}", value, unit, f"{at_most:g} {unit}", ratio, "<=1")


def rows_of(outcome: Outcome, *, is_goal: bool) -> Iterable[Row]:
    """What the outcome says; the budget binds everywhere, time and loss where the goal is."""
    title = outcome.setting.title
    yield bounded(outcome, "held by one daemon, highest", outcome.held_mib[1], "MiB", outcome.budget_mib)
    if is_goal:
        yield bounded(outcome, "latency p99", outcome.latency_ms[1], "ms", MAX_P99_MS)
        yield bounded(outcome, "busiest daemon", outcome.busy, "share", MAX_BUSY)
        yield Row(f"{title}: lost", outcome.lost, "records", "none", float(outcome.lost), "<=0")
    else:
        yield Row(f"{title}: latency p99", outcome.latency_ms[1], "ms")
        yield Row(f"{title}: busiest daemon", outcome.busy, "share")
        yield Row(f"{title}: lost", outcome.lost, "records")
    yield Row(f"{title}: latency p50", outcome.latency_ms[0], "ms")
    yield Row(f"{title}: stored", outcome.stored_per_s, "records/s")
    yield Row(f"{title}: delivered", outcome.delivered_per_s, "records/s")
    yield Row(f"{title}: age, mean", outcome.age_versions[0], "versions")
    yield Row(f"{title}: age, p99", outcome.age_versions[1], "versions")


def goal_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The most policies at the highest rate on the most shards."""
    found = [outcome for outcome in outcomes if outcome.setting in settings.shards()]
    return max(found, key=lambda outcome: outcome.setting.shards, default=None)


def print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(*cells_of(outcome))
    Console(width=190).print(table)
    core = [one for outcome in outcomes for one in outcome.core_us.items()]
    for kind in sorted({kind for kind, _ in core}):
        found = [took_us for other, took_us in core if other == kind]
        print(f"core us here, per {kind}: {min(found):.0f} to {max(found):.0f}")


def cells_of(outcome: Outcome) -> list[str]:
    asked = outcome.setting
    where = str(asked.sites) if asked.sites == 1 else f"{asked.sites} {asked.topology}"
    return [
        str(asked.policies), where, str(asked.daemons), f"{asked.simulated_s:g}", f"{asked.records_per_s}",
        f"{outcome.stored_per_s:.0f}", f"{outcome.delivered_per_s:.0f}",
        f"{outcome.held_mib[0]:.1f}", f"{outcome.held_mib[1]:.1f}",
        f"{outcome.latency_ms[0]:.1f}", f"{outcome.latency_ms[1]:.1f}",
        f"{outcome.age_versions[0]:.1f}", f"{outcome.age_versions[1]:.0f}",
        str(outcome.evicted), str(outcome.lost), f"{outcome.busy:.0%}", f"{outcome.behind_s:.2f}",
        f"{outcome.remote_mib_s:.1f}", f"{outcome.stat_ms:.0f}",
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The exchange in simulated time.")
    parser.add_argument("--quick", action="store_true", help="a little of each kind, in seconds")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS), help="these sweeps alone")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="where the figure goes (default: nowhere)")
    parser.add_argument("--budget-mib", type=int, default=32, help="memory of every daemon (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    for cost in fields(Costs):
        name = f"--{cost.name.replace('_', '-')}"
        parser.add_argument(name, type=float, default=cost.default, help="default: %(default)s")
    found = parser.parse_args()
    if found.out is not None and not found.out.parent.is_dir():
        parser.error(f"--out: {found.out.parent} is no folder")
    return found


def chosen(asked: argparse.Namespace) -> list[Setting]:
    """Each setting once, whichever sweeps have it."""
    if asked.quick:
        return settings.quick()
    return list(dict.fromkeys(setting for name in asked.only for setting in SWEEPS[name]()))


def main() -> int:
    asked = arguments()
    costs = Costs(**{cost.name: getattr(asked, cost.name) for cost in fields(Costs)})
    began_s = time.process_time()
    outcomes = []
    for setting in chosen(asked):
        outcomes.append(simulate(setting, costs, budget_mib=asked.budget_mib, seed=asked.seed))
        print(
            f"{setting.title}: {setting.simulated_s:g} s simulated in {outcomes[-1].took_s:.0f} s of CPU time",
            flush=True,
        )
    print_table(outcomes)
    print(f"{time.process_time() - began_s:.0f} s of CPU time in all")
    if asked.out is not None:
        print(f"wrote {asked.out}" if draw(outcomes, asked.out) else "no figure: none of its settings was simulated")
    goal = goal_of(outcomes)
    rows = [row for outcome in outcomes for row in rows_of(outcome, is_goal=outcome is goal)]
    for row in rows:
        if not row.ok:
            print(f"MISSED: {row.name} is {row.value:.4g} {row.unit}, at most {row.against}")
    print(json.dumps({"bench": "exchange_simulation", "rows": [row.fields for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
