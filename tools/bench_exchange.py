#!/usr/bin/env python3
"""Speed of the exchange beside Redis, for those who size or change it: publish -> stored -> decoded by a watcher.

    .venv/bin/python tools/bench_exchange.py [--quick] [--only NAME ...] [--folder PATH]

Three processes over loopback: rollout groups of 37 KB and outcomes of 1 KB go from a producer through a broker to a
consumer of another policy, which watches their prompts: encoded, stored, acknowledged, delivered, decoded, each once.
That is the way of a run's records.
rate            records per second, from the first put until the last is decoded
broker us       CPU of the broker's threads, per record: the figure that carries over to a machine with more cores
all us          CPU of the three processes, per record: on two cores it determines the rate
ack ms          from when a record is due to its acknowledgement, at half of the rate (p50, p99)
load            2,400 rollout groups and as many outcomes a second, as 1,000 GPUs produce: cores of the broker, ack ms,
                and the broker's highest resident memory
Redis has the records of each prompt in a stream of its own, so that they can be looked up, and a stream of news.
Records sent before the measured ones fill the memory in which the exchange keeps records.
The systems take turns, so that other processes of the machine disturb all of them; the best round counts, the median
stands beside it, and a line tells when the machine was not quiet. Redis is started here, in a temporary folder on a
free port: apt-get install redis-server; .venv/bin/pip install -c constraints.txt -e '.[bench]'. It is measured with its
client's parser in C (hiredis) or not at all: without that parser nothing is run (exit code 2).
Exit code 1 when a required bound is missed or could not be measured. Ends with one line of JSON.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from bench_peers import brokers
from bench_peers.loads import KINDS, SINGLE_KINDS
from bench_peers.trial import Figures, Size, System, measure
from bench_row import Row, end, print_rows
from rich import box
from rich.console import Console
from rich.table import Table

from mrl.exchange.limits import BESIDE_BUDGET_BYTES, Limits

ROUNDS = 3
LOAD_PER_S = 2 * 2400.0
FULL = Size({"rollout": 8000, "outcome": 20_000}, {"rollout": 6000, "outcome": 60_000}, 1.0, 6.0, LOAD_PER_S)
QUICK = Size({"rollout": 100, "outcome": 1000}, {"rollout": 1000, "outcome": 10_000}, 0.5, 2.0, LOAD_PER_S)
MAX_P99_MS = 20.0
MAX_CORES = 0.6
MAX_RESIDENT_BYTES = Limits().budget_bytes + BESIDE_BUDGET_BYTES
QUIET = 0.1
"""Share of the cores that other processes may take on a quiet machine."""

_NO_REDIS = brokers.missing("redis-server", "redis", "redis")
POWER, KILL = "power loss", "kill -9"
SYSTEMS = {
    "exchange-synced": System("exchange, synced", "exchange", POWER, partial(brokers.exchange, durability="synced")),
    "exchange-written": System("exchange, written", "exchange", KILL, partial(brokers.exchange, durability="written")),
    "exchange-near": System(
        "exchange, synced, socket file", "exchange", POWER, partial(brokers.exchange, durability="synced", is_near=True)
    ),
    "redis-always": System(
        "Redis, AOF always", "redis_streams", POWER, partial(brokers.redis, fsync="always"), missing=_NO_REDIS
    ),
    "redis-everysec": System(
        "Redis, AOF everysec", "redis_streams", KILL, partial(brokers.redis, fsync="everysec"), missing=_NO_REDIS
    ),
}

Rounds = dict[str, list[dict[str, Figures]]]
"""Name of a system -> its rounds -> kind of record -> figures."""


TITLES = {"rollout": "rollouts", "outcome": "outcomes", "both": "1,000 GPUs"}
MIN_RATIO = 2.0
"""Required ratio of rollouts per second to a Redis whose acknowledged records survive as much."""


def rates(rounds: Rounds, name: str, kind: str) -> list[float]:
    """Records per second of every round; [] if the system was not measured."""
    return [figures[kind].records_per_s for figures in rounds.get(name, [])]


def ratio_row(rounds: Rounds) -> Row:
    """Row of the exchange's rollouts against Redis': best against best, and median against median."""
    own, other = rates(rounds, "exchange-synced", "rollout"), rates(rounds, "redis-always", "rollout")
    both = bool(own and other)
    return Row(
        f"rollouts, {SYSTEMS['exchange-synced'].title}",
        max(own, default=math.nan),
        "records/s",
        SYSTEMS["redis-always"].title,
        max(own) / max(other) if both else None,
        f">={MIN_RATIO}",
        median(own) / median(other) if both else None,
    )


def share_row(rounds: Rounds, what: str, unit: str, bound: float, of: Callable[[Figures], float]) -> Row:
    """Row of a figure under the load of 1,000 GPUs, as a share of its bound."""
    found = [of(figures["both"]) for figures in rounds.get("exchange-synced", [])]
    return Row(
        f"1,000 GPUs, {SYSTEMS['exchange-synced'].title}: {what}",
        min(found, default=math.nan),
        unit,
        f"{bound:g} {unit}",
        min(found) / bound if found else None,
        "<=1",
        median(found) / bound if found else None,
    )


def required_rows(rounds: Rounds, chosen: Sequence[str]) -> list[Row]:
    """Rows of all bounds whose systems were asked for."""
    rows = [ratio_row(rounds)] if {"exchange-synced", "redis-always"} <= {*chosen} else []
    if "exchange-synced" in chosen:
        mib = 2**20
        rows += [
            share_row(rounds, "cores of the broker", "cores", MAX_CORES, lambda figures: figures.broker_cores),
            share_row(rounds, "p99 of acknowledgement", "ms", MAX_P99_MS, lambda figures: figures.p99_ms),
            share_row(
                rounds, "resident memory", "MiB", MAX_RESIDENT_BYTES / mib, lambda figures: figures.resident_bytes / mib
            ),
        ]
    return rows


def figure_rows(rounds: Rounds) -> list[Row]:
    """Rows of every rate and of its CPU time, which nothing bounds."""
    rows = []
    for name, found in rounds.items():
        for kind in KINDS:
            title = f"{TITLES[kind]}, {SYSTEMS[name].title}"
            rows.append(Row(title, max(rates(rounds, name, kind)), "records/s"))
            for part, cpu_us in (
                ("broker CPU", min(figures[kind].broker_us for figures in found)),
                ("CPU of all three", min(figures[kind].chain_us for figures in found)),
            ):
                rows.append(Row(f"{title}: {part}", cpu_us, "us/record"))
    return rows


def take_turns(chosen: Sequence[str], size: Size, num_rounds: int, folder: Path | None) -> Rounds:
    """Measure rounds of all systems in turns, in the opposite order every other time."""
    rounds: Rounds = {name: [] for name in chosen}
    for number in range(num_rounds):
        for name in chosen[:: -1 if number % 2 else 1]:
            rounds[name].append(measure(SYSTEMS[name], size, folder))
            told = ", ".join(
                f"{TITLES[kind]} {figures.records_per_s:.0f}/s ({figures.others:.0%} of the cores went to others)"
                for kind, figures in rounds[name][-1].items()
            )
            print(f"round {number + 1} of {num_rounds}, {SYSTEMS[name].title}: {told}", flush=True)
    return rounds


def print_figures(rounds: Rounds) -> None:
    table = Table("system", "acknowledged survives", box=box.SIMPLE_HEAD)
    for kind in SINGLE_KINDS:
        for heading in (f"{kind}s/s", "median", "broker us", "all us", "ack p50 ms", "p99 ms"):
            table.add_column(heading, justify="right")
    for heading in ("load: cores", "ack p50 ms", "p99 ms", "peak MB"):
        table.add_column(heading, justify="right")
    for name, found in rounds.items():
        cells = [cell for kind in SINGLE_KINDS for cell in cells_of([figures[kind] for figures in found])]
        load = [figures["both"] for figures in found]
        cells += [
            f"{min(one.broker_cores for one in load):.2f}",
            f"{min(one.p50_ms for one in load):.2f}",
            f"{min(one.p99_ms for one in load):.2f}",
            f"{max(one.resident_bytes for one in load) / 1e6:.0f}",
        ]
        table.add_row(SYSTEMS[name].title, SYSTEMS[name].durable, *cells)
    Console(width=200).print(table)


def cells_of(found: Sequence[Figures]) -> list[str]:
    """Cells of one kind of record: best and median rate, least CPU, best quantiles."""
    found_per_s = [figures.records_per_s for figures in found]
    return [
        f"{max(found_per_s):.0f}",
        f"{median(found_per_s):.0f}",
        f"{min(figures.broker_us for figures in found):.1f}",
        f"{min(figures.chain_us for figures in found):.1f}",
        f"{min(figures.p50_ms for figures in found):.2f}",
        f"{min(figures.p99_ms for figures in found):.2f}",
    ]


def print_disturbance(rounds: Rounds) -> None:
    """Print a warning when other processes disturbed measurements."""
    shares = [figures.others for found in rounds.values() for one in found for figures in one.values()]
    disturbed = sum(share > QUIET for share in shares)
    if disturbed:
        print(f"NOT QUIET: in {disturbed} of {len(shares)} measurements others took over {QUIET:.0%} of the cores")


def chosen_systems(prefixes: Sequence[str]) -> list[str]:
    """Names of systems that begin with one of the prefixes; all without any."""
    return [name for name in SYSTEMS if not prefixes or name.startswith(tuple(prefixes))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed of the exchange beside Redis.")
    parser.add_argument("--quick", action="store_true", help="one round of small sizes")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"systems of {', '.join(SYSTEMS)}, or beginnings of their names",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the brokers' files go (default: the system's folder for temporary ones)"
    )
    found = parser.parse_args()
    if unknown := [name for name in found.only if not chosen_systems([name])]:
        parser.error(f"--only: no system {unknown[0]}; wanted one of {', '.join(SYSTEMS)}, or how they begin")
    if found.folder is not None and not found.folder.is_dir():
        parser.error(f"--folder: {found.folder} is no folder")
    chosen = (SYSTEMS[name] for name in chosen_systems(found.only))
    if any(one.module == "redis_streams" and not one.missing for one in chosen) and (
        fault := brokers.redis_parses_slowly()
    ):
        parser.error(fault)
    return found


def main() -> int:
    asked = arguments()
    chosen = chosen_systems(asked.only)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first round", flush=True)
    for name in chosen:
        if SYSTEMS[name].missing:
            print(f"skipped {SYSTEMS[name].title}: {SYSTEMS[name].missing}", flush=True)
    present = [name for name in chosen if not SYSTEMS[name].missing]
    began_s = time.monotonic()
    rounds = take_turns(present, QUICK if asked.quick else FULL, 1 if asked.quick else ROUNDS, asked.folder)
    rows = required_rows(rounds, chosen)
    print_figures(rounds)
    print_rows(rows)
    print_disturbance(rounds)
    print(f"{time.monotonic() - began_s:.0f} s, load {os.getloadavg()[0]:.1f} after the last round")
    return end("exchange", [*rows, *figure_rows(rounds)])


if __name__ == "__main__":
    sys.exit(main())
