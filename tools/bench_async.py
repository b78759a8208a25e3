"""Steps per hour of the asynchronous mode of mrl beside its synchronous mode, for users who choose between them.

Both are measured by real runs on the same cores.

One policy, its engine and its learner with one thread each: as on a machine with a GPU for either, and all that two
cores hold. (Two threads each, since a synchronous run uses them in turn, make so small a model slower.)
Every answer is verified in 200 ms by a verifier such as users plug in (`slow_verifier.py`), a step's 64 at once.
Answers are log-normal in length, of mean 71 and at most 190 tokens (`counting_task.py`).
The asynchronous mode runs twice: with the best number of answers in flight, set by hand, and with as many as its
staleness bound allows at `learner.pace = "adaptive"`, which has to find that number by itself.
All modes train on the same number of samples. They take turns, with a seed for each round; medians count.

    .venv/bin/python tools/bench_async.py [--rounds N] [--steps N] [--folder DIR]

Prints a table; the last line is JSON. Ends with 1 when an asynchronous mode makes less than 1.5 times the steps per
hour, or its held-out accuracy at the end is lower by more than two standard errors.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_row import Row, end, print_rows

from mrl.metrics.jsonl import each_metrics

TOOLS = Path(__file__).parent
REQUIRED_RATIO = 1.5
STANDARD_ERRORS = 2.0
TRAIN_PROMPTS, HELD_OUT_PROMPTS = 2048, 384
PROMPTS_PER_STEP, GROUP_SIZE, MAX_TOKENS = 8, 8, 192
MAX_STALENESS_VERSIONS = 4
BATCHES_IN_FLIGHT = 2
"""Batches in flight, asynchronous: less than half of what its staleness bound allows, so that few answers go stale."""
FEWEST_STEPS = 10
"""Number of steps over which a rate is taken at least."""
RUN_S = 1800.0
CONFIG = """
[run]
name = "{name}"
folder = "{folder}/runs"
seed = {seed}
steps = {steps}
sync = {sync}

[pool]
train_prompts = 0
held_out_prompts = 0

[tasks.count]
source = "jsonl"
dataset = "{folder}/train.jsonl"
options = {{ held_out = "{folder}/held_out.jsonl" }}
verifier = "slow_verifier:after_200_ms"
verifier_processes = {answers_per_step}

[evaluation]
every = 0

[policies.qwen]
model = "{folder}/policy"

[policies.qwen.rollout]
group_size = {group_size}
max_new_tokens = {max_tokens}

[policies.qwen.learner]
prompts_per_step = {prompts_per_step}
lr = 1e-4
checkpoint_every = 0
max_staleness_versions = {max_staleness_versions}
pace = "{pace}"

[allocation]
slots = {slots}
"""


@dataclass(frozen=True)
class Mode:
    """Settings of one mode."""

    sync: bool
    batches_in_flight: int
    pace: str = "staleness_bound"


ASYNCHRONOUS, ADAPTIVE, SYNCHRONOUS = "asynchronous", "adaptive", "synchronous"
MODES = {
    ASYNCHRONOUS: Mode(sync=False, batches_in_flight=BATCHES_IN_FLIGHT),
    ADAPTIVE: Mode(sync=False, batches_in_flight=MAX_STALENESS_VERSIONS + 1, pace="adaptive"),
    SYNCHRONOUS: Mode(sync=True, batches_in_flight=BATCHES_IN_FLIGHT),
}


@dataclass(frozen=True)
class Outcome:
    """Figures of one run."""

    steps_per_hour: float
    accuracy_before: float
    accuracy_after: float
    values: list[dict[str, float]]
    """Metrics of the learner, one dictionary for each step that counts."""
    engine_busy_share: float

    def mean(self, name: str) -> float:
        """Mean of one metric over the steps that count."""
        return statistics.fmean(values[name] for values in self.values)


# The runs.


def run(folder: Path, mode: str, *, seed: int, steps: int) -> Outcome:
    """Run `mrl train` to its end and return its figures."""
    name, how = f"{mode}-{seed}", MODES[mode]
    config = folder / f"{name}.toml"
    config.write_text(
        CONFIG.format(
            name=name,
            folder=folder,
            seed=seed,
            steps=steps,
            sync=str(how.sync).lower(),
            answers_per_step=PROMPTS_PER_STEP * GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            slots=how.batches_in_flight * PROMPTS_PER_STEP * GROUP_SIZE,
            max_staleness_versions=MAX_STALENESS_VERSIONS,
            pace=how.pace,
            prompts_per_step=PROMPTS_PER_STEP,
        )
    )
    with child([sys.executable, "-m", "mrl", "train", str(config), "--clean"], folder / f"{name}.log") as process:
        if process.wait(RUN_S):
            raise RuntimeError(f"{name} ended with {process.returncode}, see {folder / name}.log")
    return outcome(folder / "runs" / name, steps)


@contextmanager
def child(argv: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that is told to end, and awaited, when the block is left."""
    environment = os.environ | {"PYTHONPATH": str(TOOLS)}
    with log.open("wb") as output, subprocess.Popen(argv, stdout=output, stderr=output, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()


def outcome(run_folder: Path, steps: int) -> Outcome:
    """Read the figures of a run.

    Steps count once the first evaluation, which takes half of the places and verifiers, is over.
    """
    records = [record for record in each_metrics(run_folder / "metrics.jsonl") if "values" in record]
    evaluated_s = min(record["time_unix_s"] for record in records if "eval/accuracy" in record["values"])
    learner = [
        record for record in records if record["role"].startswith("learner") and "loss/total" in record["values"]
    ]
    counting = [record for record in learner if record["time_unix_s"] >= evaluated_s]
    if len(counting) <= FEWEST_STEPS:
        raise RuntimeError(f"{run_folder.name}: too few steps after the first evaluation; take more --steps")
    seconds = counting[-1]["time_unix_s"] - counting[0]["time_unix_s"]
    worker = [record for record in records if record["role"].startswith("worker")]
    return Outcome(
        steps_per_hour=3600.0 * (len(counting) - 1) / seconds,
        accuracy_before=accuracy(run_folder, 0),
        accuracy_after=accuracy(run_folder, steps),
        values=[record["values"] for record in counting],
        engine_busy_share=busy_share(worker, counting[0]["time_unix_s"]),
    )


def accuracy(run_folder: Path, step: int) -> float:
    """Held-out accuracy of one version."""
    found = json.loads((run_folder / "evaluation" / f"qwen-{step}.json").read_text())
    return float(found["accuracy"])


def busy_share(worker: Sequence[dict[str, Any]], since_unix_s: float) -> float:
    """Share of the time since `since_unix_s` in which the engine had answers to sample."""
    first, last = (next(one for one in order if one["time_unix_s"] >= since_unix_s) for order in (worker, worker[::-1]))
    idle_s = last["values"]["rollout/idle_s"] - first["values"]["rollout/idle_s"]
    return 1.0 - idle_s / max(last["time_unix_s"] - first["time_unix_s"], 1e-9)


def measure(folder: Path, *, rounds: int, steps: int) -> dict[str, list[Outcome]]:
    """Run all modes in turns, every other round in the opposite order."""
    found: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
    for round_number in range(1, rounds + 1):
        for mode in [*MODES][:: 1 if round_number % 2 else -1]:
            began_s = time.monotonic()
            found[mode].append(run(folder, mode, seed=round_number, steps=steps))
            seconds, rate = time.monotonic() - began_s, found[mode][-1].steps_per_hour
            print(f"round {round_number}, {mode}: {rate:.0f} steps/hour, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


# The figures.


def rows_of(found: dict[str, list[Outcome]]) -> list[Row]:
    """Rates and accuracies of the asynchronous modes against the synchronous one."""
    rates = {mode: statistics.median(one.steps_per_hour for one in outcomes) for mode, outcomes in found.items()}
    after = {mode: [one.accuracy_after for one in outcomes] for mode, outcomes in found.items()}
    before = statistics.fmean(one.accuracy_before for outcomes in found.values() for one in outcomes)
    target = statistics.fmean(after[SYNCHRONOUS])
    name = "held-out accuracy after"
    rows = [Row(SYNCHRONOUS, rates[SYNCHRONOUS], "steps/hour")]
    rows += [
        Row(mode, rates[mode], "steps/hour", SYNCHRONOUS, rates[mode] / rates[SYNCHRONOUS], f">={REQUIRED_RATIO}")
        for mode in (ASYNCHRONOUS, ADAPTIVE)
    ]
    rows += [Row("held-out accuracy before", before, "share"), Row(f"{name}, {SYNCHRONOUS}", target, "share")]
    for mode in (ASYNCHRONOUS, ADAPTIVE):
        least = target - STANDARD_ERRORS * standard_error(after[mode], after[SYNCHRONOUS])
        allowed = f"{SYNCHRONOUS} less {STANDARD_ERRORS:g} standard errors, {least:.3f}"
        mean = statistics.fmean(after[mode])
        rows.append(Row(f"{name}, {mode}", mean, "share", allowed, mean / least, ">=1"))
    return rows


def standard_error(*sides: Sequence[float]) -> float:
    """Standard error of the difference between two means of accuracies.

    Each side's variance comes from the answers drawn, or from run to run where that is more.

    >>> round(standard_error([0.5], [0.5]), 4)
    0.0361
    """
    variance = 0.0
    for accuracies in sides:
        share = statistics.fmean(accuracies)
        drawn = share * (1.0 - share) / HELD_OUT_PROMPTS
        seen = statistics.variance(accuracies) if len(accuracies) > 1 else 0.0
        variance += max(drawn, seen) / len(accuracies)
    return math.sqrt(variance)


def print_runs(found: dict[str, list[Outcome]]) -> None:
    """Print where the time of a step goes, and what asynchrony costs in freshness."""
    parts = {
        "step s": "time/step_s",
        "wait s": "time/wait_for_groups_s",
        "train s": "time/train_s",
        "publish s": "time/publish_s",
        "answer": "tokens/answer_mean",
        "stale": "staleness/mean_versions",
        "dropped": "staleness/dropped_groups",
    }
    print(f"{'means':14}" + "".join(f"{part:>10}" for part in parts) + f"{'engine':>10}   steps/hour of every round")
    for mode, outcomes in found.items():
        means = [statistics.fmean(one.mean(name) for one in outcomes) for name in parts.values()]
        busy = statistics.fmean(one.engine_busy_share for one in outcomes)
        rates = ", ".join(f"{one.steps_per_hour:.0f}" for one in outcomes)
        print(f"{mode:14}" + "".join(f"{mean:10.2f}" for mean in means) + f"{busy:10.0%}   {rates}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of either mode")
    parser.add_argument("--steps", type=int, default=60, help="steps of every run")
    parser.add_argument("--folder", type=Path, help="where policy, prompts and runs stay; a policy there is taken")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-async-") as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "policy" / "config.json").exists():
            words = [TOOLS / "counting_task.py", folder, str(TRAIN_PROMPTS), str(HELD_OUT_PROMPTS)]
            subprocess.run([sys.executable, *words], check=True)
        found = measure(folder, rounds=arguments.rounds, steps=arguments.steps)
    print_runs(found)
    rows = rows_of(found)
    print_rows(rows)
    return end("async", rows)


if __name__ == "__main__":
    sys.exit(main())
