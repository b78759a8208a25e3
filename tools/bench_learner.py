#!/usr/bin/env python3
"""Training speed beside TRL's GRPOTrainer, for its users: samples from prompt to update, and tokens, per CPU second.

    .venv/bin/python tools/bench_learner.py [--only NAME ...] [--repeats N] [--steps N]

Both sides train the same policies (4.2 M parameters, Qwen3) from the same weights with the same tokenizer, prompts,
verifier's verdicts, GRPO loss and AdamW: 16 prompts a step, 8 answers each. The lengths of answers are known
beforehand: 64 tokens each, or log-normal of mean 71, cut at 192 (see bench_training/policy.py).

Compared are whole systems. mrl is `mrl train` as a user starts it, asynchronous, with learner, rollout worker,
exchange, allocator and supervisor; every CPU second of these processes counts, from the first published weights to the
last step's report. TRL (a pinned release in an environment of its own, made in the user's cache the first time) is one
process per policy, whose CPU seconds count from the beginning of training to the end of the last step; its settings
are in bench_training/trl_side.py. The start of either side is reported apart. Each policy has one core: a load of one
policy is bound to core 0, and of two to cores 0 and 1, where TRL runs both processes at once.

First a gate: both sides' log-probabilities of the same answers agree to 1e-4 nats, their advantages to 1e-6, and one
optimizer step on them moves the parameters alike, to 0.1 % of the length of the step. The sides take turns, so that
other processes of the machine disturb both. Exit code 1 when a required ratio is missed. Ends with one line of JSON.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from bench_row import Row, end, print_rows
from bench_training.environment import PINS, requirements, trl_python
from bench_training.gate import compare
from bench_training.load import LOADS, Load, Workplace
from bench_training.mrl_run import run_mrl
from bench_training.spent import Spent
from bench_training.trl_run import run_trl
from rich import box
from rich.console import Console
from rich.table import Table

CORES = ("0", "1")
TRL = PINS[0].replace("==", " ")

Rounds = dict[str, list[Spent]]
"""Side -> its rounds of one load."""


def take_turns(place: Workplace, python: Path, *, repeats: int, steps: int) -> Rounds:
    """Run rounds of both sides; the side that begins changes every time."""
    cores = CORES[: len(place.load.policies)]
    sides: dict[str, Callable[[str], Spent]] = {
        "mrl": lambda run: run_mrl(place, run, steps=steps, cores=",".join(cores)),
        TRL: lambda run: run_trl(place, python, run, steps=steps, cores=cores),
    }
    rounds: Rounds = {name: [] for name in sides}
    for number in range(repeats):
        for name in [*sides][:: -1 if number % 2 else 1]:
            spent = sides[name](f"{name.partition(' ')[0]}-{number}")
            rounds[name].append(spent)
            told = f"{spent.samples_per_cpu_s:.2f} samples/CPU s, {spent.mean_tokens:.1f} tokens each"
            print(f"{place.load.title}, round {number + 1} of {repeats}, {name}: {told}", flush=True)
    return rounds


def ratio_row(name: str, unit: str, rates: dict[str, list[float]], at_least: float | None) -> Row:
    """Row of best against best, and median against median; its value is mrl's median."""
    ours, theirs = rates["mrl"], rates[TRL]
    required = None if at_least is None else f">={at_least:g}"
    return Row(name, median(ours), unit, TRL, max(ours) / max(theirs), required, median(ours) / median(theirs))


def rows_of(load: Load, rounds: Rounds) -> list[Row]:
    """Rows of a load: end to end, and training alone."""

    def rates(of: Callable[[Spent], float]) -> dict[str, list[float]]:
        return {name: [of(spent) for spent in found] for name, found in rounds.items()}

    samples, trained = rates(lambda spent: spent.samples_per_cpu_s), rates(lambda spent: spent.trained_tokens_per_cpu_s)
    return [
        ratio_row(f"{load.title}: end to end", "samples/CPU s", samples, load.samples_at_least),
        ratio_row(f"{load.title}: training alone", "tokens/CPU s", trained, load.trained_at_least),
    ]


def print_figures(rounds_of: dict[str, Rounds]) -> None:
    """Print every side's CPU seconds by purpose, medians over its rounds, with the range of its rate."""
    table = Table("load", "side", box=box.SIMPLE_HEAD)
    for heading in ("samples/CPU s", "from", "to", "tokens each", "tokens/CPU s", "trained tokens/CPU s"):
        table.add_column(heading, justify="right")
    for heading in ("rollout", "training", "rest", "start-up CPU s"):
        table.add_column(heading, justify="right")
    for title, rounds in rounds_of.items():
        for name, found in rounds.items():
            table.add_row(title, name, *cells_of(found))
    Console(width=170).print(table)


def cells_of(found: Sequence[Spent]) -> list[str]:
    """Cells of one side of one load."""
    rates = [spent.samples_per_cpu_s for spent in found]
    rollout, training = (
        median(part / spent.cpu_s for part, spent in zip(parts, found, strict=True))
        for parts in ([s.rollout_cpu_s for s in found], [s.train_cpu_s for s in found])
    )
    return [
        *(f"{rate:.2f}" for rate in (median(rates), min(rates), max(rates))),
        f"{median(spent.mean_tokens for spent in found):.1f}",
        *(f"{median(values):.0f}" for values in ([s.tokens_per_cpu_s for s in found],)),
        f"{median(spent.trained_tokens_per_cpu_s for spent in found):.0f}",
        *(f"{share:.0%}" for share in (rollout, training, max(0.0, 1.0 - rollout - training))),
        f"{median(spent.startup_cpu_s for spent in found):.0f}",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="mrl's learner and its whole run beside TRL's GRPOTrainer.")
    names = [load.name for load in LOADS]
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds of every side and load")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a round")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first round", flush=True)
    torch.set_num_threads(1)
    began_s = time.monotonic()
    python = trl_python(requirements())
    rounds_of: dict[str, Rounds] = {}
    rows: list[Row] = []
    for load in (load for load in LOADS if load.name in asked.only):
        with tempfile.TemporaryDirectory(prefix="mrl-bench-") as scratch:
            place = Workplace(Path(scratch), load)
            gap = compare(place, python, CORES[0])
            print(f"{load.title}: gate: {gap}", flush=True)
            if not gap.is_open:
                print("the two sides do not compute the same thing: nothing is measured", file=sys.stderr)
                return 1
            rounds_of[load.title] = take_turns(place, python, repeats=asked.repeats, steps=asked.steps)
        rows += rows_of(load, rounds_of[load.title])
    print_figures(rounds_of)
    print_rows(rows)
    print(f"{time.monotonic() - began_s:.0f} s, load {os.getloadavg()[0]:.1f} after the last round")
    return end("learner", rows)


if __name__ == "__main__":
    sys.exit(main())
