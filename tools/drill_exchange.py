#!/usr/bin/env python3
"""Fault drills of the exchange, for those who rely on it: a real daemon under load is killed, cut off and attacked.

    .venv/bin/python tools/drill_exchange.py [--faults NAME,NAME] [--kills 200] [--seed N] [--folder PATH]

The daemon is also stopped, starved of disk and memory, and opened with a damaged log.
Two producers publish records of 100 bytes to 250 KB, some 2,000 a second; a consumer of another policy watches their
prompts, and writes the ids of records that it has trained on into a checkpoint. Started again it asks for the records
that it awaits, and drops by their ids those that its checkpoint holds. At the end the producers wait for their last
acknowledgement, and the checkpoints are compared with it; records in no checkpoint are asked for once more.
lost        records acknowledged to a producer, in no checkpoint, not found, and not counted as evicted by the daemon
doubled     records in the checkpoints twice
recovery    from the end of the fault (of a death: from its begin) until records are acknowledged and trained on again
peak        highest resident memory of the daemon; allowed are its budget and 150 MB or, attacked, its hard limit
Drills that need root (network namespaces, a small disk) or a package (nftables) say so when it is missing.
Exit code 1 when a record was lost or doubled, or a bound was missed. Ends with one line of JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from exchange_drill import faults, memory, network, torn
from exchange_drill.faults import Drill, Settings
from exchange_drill.outcome import Outcome
from rich import box
from rich.console import Console
from rich.table import Table


def legs_of_kills(settings: Settings) -> list[Drill]:
    """Drills with half of the kills under each durability."""
    share = -(-settings.kills // 2)
    return [partial(faults.kill_daemon, durability=durability, kills=share) for durability in ("synced", "written")]


def legs_of_memory(settings: Settings) -> list[Drill]:
    """Drills with all attacks and without a consumer; or with the attacks that were asked for."""
    attacks: list[Drill] = [partial(memory.attack, name=name) for name in settings.attacks or memory.TITLES]
    if settings.attacks:
        return attacks
    return [memory.no_consumer, *attacks]


FAULTS: Mapping[str, Callable[[Settings], Sequence[Drill]]] = {
    "kill": legs_of_kills,
    "torn": lambda _: [torn.torn_log],
    "consumer": lambda _: [faults.kill_consumer],
    "producer": lambda _: [faults.kill_producer],
    "partition": lambda _: [network.partition],
    "stop": lambda _: [faults.stop],
    "disk": lambda _: [faults.full_disk],
    "memory": legs_of_memory,
    "bomb": lambda _: [memory.bomb],
}


def run_drill(drill: Drill, name: str, folder: Path, settings: Settings) -> Outcome:
    """Run a drill and print its verdict. A drill that cannot go on is not passed."""
    began_s = time.monotonic()
    try:
        outcome = drill(folder, settings)
    except (RuntimeError, OSError) as error:
        outcome = Outcome(f"{name} ({folder.name})", failures=[str(error)])
    said = "; ".join(outcome.faults()) or "passed"
    print(f"{outcome.fault}: {said} ({time.monotonic() - began_s:.0f} s)", flush=True)
    return outcome


def print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table("fault", box=box.SIMPLE_HEAD)
    for heading in ("tried", "acknowledged", "lost", "doubled", "evicted", "p50 s", "max s", "peak MB", "allowed"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for outcome in outcomes:
        numbers = (outcome.tried, outcome.acknowledged, outcome.lost, outcome.doubled, outcome.evicted)
        times = [f"{value:.2f}" for value in outcome.recovery_s or ()] or ["-", "-"]
        sizes = [f"{size / 1e6:.0f}" if size else "-" for size in (outcome.peak_bytes, outcome.peak_bound_bytes)]
        verdict = "; ".join([*outcome.faults(), *outcome.notes])
        table.add_row(outcome.fault, *(f"{number}" for number in numbers), *times, *sizes, verdict)
    Console(width=200).print(table)


def rows_of(outcome: Outcome) -> list[dict[str, object]]:
    """Rows, for the last line, of the figures of one outcome."""

    def row(what: str, value: float, unit: str, bound: float | None) -> dict[str, object]:
        return {
            "name": f"{outcome.fault}: {what}",
            "value": value,
            "unit": unit,
            "against": "" if bound is None else f"{bound:g} {unit}",
            "ratio": value / bound if bound else None,
            "required": None if bound is None else f"<={bound:g}",
            "ok": bound is None or value <= bound,
        }

    rows = [row("tried", outcome.tried, "faults", None), row("acknowledged", outcome.acknowledged, "records", None)]
    rows += [row("lost", outcome.lost, "records", 0), row("doubled", outcome.doubled, "records", 0)]
    rows += [row("evicted", outcome.evicted, "records", None), row("unasked deaths", outcome.deaths, "deaths", None)]
    if outcome.recovery_s:
        rows.append(row("recovery, median", outcome.recovery_s[0], "s", None))
        rows.append(row("recovery, longest", outcome.recovery_s[1], "s", outcome.recovery_bound_s))
    if outcome.peak_bytes:
        rows.append(row("peak resident memory", outcome.peak_bytes, "bytes", outcome.peak_bound_bytes or None))
    rows += [{**row(failure, 1, "failures", 0)} for failure in outcome.failures]
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Faults of the exchange.")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), metavar="NAME,NAME", help=f"faults, of {', '.join(FAULTS)}"
    )
    parser.add_argument("--kills", type=int, default=200, help="number of kills of the daemon, in all")
    parser.add_argument("--deaths", type=int, default=20, help="number of deaths of consumers, and of producers")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of full disks, partitions, bombs")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of a SIGSTOP")
    parser.add_argument("--partition-seconds", type=float, default=6.0, help="seconds of a partition")
    parser.add_argument("--attack-seconds", type=float, default=15.0, help="seconds of an attack on the memory")
    parser.add_argument("--attacks", metavar="NAME,NAME", help=f"attacks on the memory, of {', '.join(memory.TITLES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="folder to write run folders to (default: that for temporary files)"
    )
    found = parser.parse_args()
    if unknown := [name for name in found.faults.split(",") if name not in FAULTS]:
        parser.error(f"--faults: no fault {unknown[0]}; wanted some of {', '.join(FAULTS)}")
    if unknown := [name for name in attacks_of(found) if name not in memory.TITLES]:
        parser.error(f"--attacks: no attack {unknown[0]}; wanted some of {', '.join(memory.TITLES)}")
    if found.folder is not None and not found.folder.is_dir():
        parser.error(f"--folder: {found.folder} is no folder")
    return found


def attacks_of(asked: argparse.Namespace) -> list[str]:
    return asked.attacks.split(",") if asked.attacks else []


def main() -> int:
    asked = arguments()
    settings = Settings(
        kills=asked.kills,
        deaths=asked.deaths,
        stop_s=asked.seconds,
        partition_s=asked.partition_seconds,
        attack_s=asked.attack_seconds,
        attacks=tuple(attacks_of(asked)),
        rounds=asked.rounds,
        seed=asked.seed,
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, seed {settings.seed}", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="drill-", dir=asked.folder) as root:
        for name in asked.faults.split(","):
            for number, drill in enumerate(FAULTS[name](settings)):
                outcomes.append(run_drill(drill, name, Path(root) / f"{name}-{number}", settings))
    print_table(outcomes)
    print(json.dumps({"bench": "exchange_faults", "rows": [row for one in outcomes for row in rows_of(one)]}))
    return 1 if any(outcome.faults() for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
