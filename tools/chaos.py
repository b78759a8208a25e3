#!/usr/bin/env python3
"""Chaos test of a run, for those who rely on one: random deaths of its processes, and their effect on its result.

    .venv/bin/python tools/chaos.py CONFIG [--minutes 10] [--every 10] [--unbroken 3] [--seed 0]
                                    [--roles exchange,worker/qwen/0,...] [--kinds kill,pause,hang]
                                    [--runs FOLDER] [--out PNG] [KEY VALUE ...]

The run trains under faults: about every so many seconds one role gets kill -9, is stopped for two seconds, or is
stopped for good, so that the supervisor has to notice. A client of the run's exchange publishes records of its own
meanwhile. The run has to end by itself, versions have to rise, the slots that all workers together may have in use
never exceed those of the run (by the allocator's account, and by the workers' own logs), no acknowledged record may be
missing from the exchange's log, no process may be left, and the accuracy has to lie within two standard errors of
unbroken runs.

Prints tables; the last line is JSON, and the exit code 1 when a requirement did not hold. Words after the options are
overrides of the configuration, for all runs.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from chaos_drill.faults import KINDS, Fault, Saboteur
from chaos_drill.outcome import Outcome, outcome_of
from chaos_drill.slots import End, most_in_use
from chaos_drill.trial import Trial, roles_of, train
from chaos_drill.witness import Witness

from mrl.config.load import load_config
from mrl.config.schema import RunConfig

# Faults come far more often than in life: restarts after which a supervisor rightly gives up are allowed here.
PATIENCE = ("--supervision.max_restarts", "1000", "--supervision.max_learner_restarts", "1000")
SILENCE = ("--supervision.silence_s", "8", "--supervision.start_s", "60")
LIMIT_S = 3600.0
WINDOW_STEPS = 10
HIT_S = 0.5
"""Seconds after a fault by which its process has got the signal and says no more, and no successor speaks yet."""


def main() -> int:
    asked, overrides = arguments()
    runs = asked.runs or Path(tempfile.mkdtemp(prefix="chaos_"))
    rows = drill(asked, runs, overrides, load_config(asked.config, overrides))
    for row in rows:
        verdict = "ok" if row["ok"] else "FAIL"
        print(f"{verdict:5}{row['name']:52}{row['value']:10.3f} {row['unit']:11}{row['required']}")
    print(json.dumps({"bench": "chaos", "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def drill(asked: argparse.Namespace, runs: Path, overrides: Sequence[str], config: RunConfig) -> list[dict[str, Any]]:
    """Compare one run under faults with unbroken ones; return its rows."""
    whole = [unbroken(asked.config, runs, f"unbroken-{number}", overrides) for number in range(1, asked.unbroken + 1)]
    trial = train(asked.config, runs, "broken", *PATIENCE, *SILENCE, *overrides)
    roles = asked.roles.split(",") if asked.roles else roles_of(config.learning)
    saboteur = Saboteur(roles, asked.kinds.split(","), every_s=asked.every, seed=asked.seed)
    source, reader = config.learning[0], config.learning[-1]
    witness = Witness(trial.folder, source)
    witness.start()
    trial.run(saboteur, faults_for_s=asked.minutes * 60, limit_s=LIMIT_S)
    witness.stop()
    left = trial.left_behind()
    broken = outcome_of(trial.folder)
    print_faults(saboteur.faults, trial.seconds)
    print(*trial.disorders(), sep="\n", end="")
    draw(whole, broken, len(saboteur.faults), asked.out)
    return [
        row("exit code of the run", trial.code or 0, "code", trial.code == 0, "0"),
        row("faults", len(saboteur.faults), "faults", bool(saboteur.faults), "> 0"),
        row("versions out of order", len(trial.disorders()), "versions", not trial.disorders(), "0"),
        slots_row("by the allocator's account", broken.most_held_slots, config),
        slots_row("by the workers' own logs", most_in_use(trial.folder, ends_of(trial, saboteur.faults)), config),
        *lost_row(witness, reader),
        row("processes left behind", left, "processes", left == 0, "0"),
        *accuracy_row(broken, whole, config.pool.held_out_prompts),
    ]  # fmt: skip


def slots_row(whose: str, most: float, config: RunConfig) -> dict[str, Any]:
    """Row of the slots that all workers may have had in use at one moment."""
    slots = config.allocation.slots
    return row(f"slots in use at once, {whose}", most, "slots", 0 < most <= slots, f"<= {slots}")


def ends_of(trial: Trial, faults: Sequence[Fault]) -> dict[str, list[End]]:
    """Return role -> ends of its processes: when they were gone or stopped for good, and used no slots any more."""
    zero_unix_s = time.time() - time.monotonic()
    ends = {role: list(times) for role, times in trial.ends.items()}
    for fault in faults:
        if fault.kind != "pause":
            hit_unix_s = zero_unix_s + fault.at_s
            ends.setdefault(fault.role, []).append((hit_unix_s, hit_unix_s + HIT_S))
    return ends


def lost_row(witness: Witness, reader: str) -> list[dict[str, Any]]:
    """Row of the records that the exchange acknowledged and does not have."""
    lost = witness.num_lost(reader)
    name = f"lost of {witness.num_acknowledged} acknowledged records"
    return [row(name, lost, "records", witness.num_acknowledged > 0 and lost == 0, "0")]


def accuracy_row(broken: Outcome, whole: Sequence[Outcome], num_prompts: int) -> list[dict[str, Any]]:
    """Row of the accuracy's distance from the mean of unbroken runs, in standard errors of that difference.

    The variance of one run is that of the unbroken ones, and at least that of drawing one answer to each prompt.
    """
    if len(whole) < 2:
        return []
    accuracies = [one.accuracy for one in whole]
    middle = mean(accuracies)
    drawn = math.sqrt(middle * (1 - middle) / (num_prompts * len(broken.accuracies)))
    error = max(stdev(accuracies), drawn) * math.sqrt(1 + 1 / len(whole))
    distance = abs(broken.accuracy - middle) / error
    name = f"accuracy {broken.accuracy:.3f} against {middle:.3f} of {len(whole)} unbroken"
    return [row(name, distance, "std errors", distance <= 2, "<= 2")]


def unbroken(config: Path, runs: Path, name: str, overrides: Sequence[str]) -> Outcome:
    """Outcome of a run without faults, which is run unless its report is there already."""
    trial = train(config, runs, name, *overrides)
    if not (trial.folder / "report.html").exists():
        trial.run(None, faults_for_s=0.0, limit_s=LIMIT_S)
    return outcome_of(trial.folder)


def row(name: str, value: float, unit: str, is_ok: bool, required: str) -> dict[str, Any]:
    """Make a row of the result."""
    return {"name": name, "value": value, "unit": unit, "against": "", "ratio": None, "required": required, "ok": is_ok}


def print_faults(faults: Sequence[Fault], seconds: float) -> None:
    """Print for each role how often it was hit, and how long it was gone until it was replaced."""
    print(f"{len(faults)} faults in a run of {seconds:.0f} s")
    print(f"{'role':18}{''.join(f'{kind:>8}' for kind in KINDS)}{'replaced':>10}{'median s':>10}{'longest s':>11}")
    for role in dict.fromkeys(fault.role for fault in faults):
        of_role = [fault for fault in faults if fault.role == role]
        counts = "".join(f"{sum(fault.kind == kind for fault in of_role):8}" for kind in KINDS)
        gone = [fault.replaced_s for fault in of_role if fault.replaced_s is not None]
        times = f"{median(gone):10.1f}{max(gone):11.1f}" if gone else f"{'-':>10}{'-':>11}"
        print(f"{role:18}{counts}{len(gone):10}{times}")


def draw(whole: Sequence[Outcome], broken: Outcome, num_faults: int, path: Path | None) -> None:
    """Draw rewards by step, a panel for each policy."""
    if path is None:
        return
    import matplotlib.pyplot as plt

    policies = sorted(broken.rewards)
    figure, panels = plt.subplots(1, len(policies), figsize=(4.5 * len(policies), 3.2), sharey=True, squeeze=False)
    for panel, policy in zip(panels[0], policies, strict=True):
        for one in whole:
            panel.plot(*smooth(one.rewards[policy]), color="0.6", lw=1, label="unbroken" if one is whole[0] else None)
        panel.plot(*smooth(broken.rewards[policy]), color="C3", lw=1.6, label=f"{num_faults} faults")
        panel.set(title=policy, xlabel="step")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"mean reward of a batch, over {WINDOW_STEPS} steps")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smooth(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return steps and means over the last few; for a step trained again after a fault the last value counts."""
    last = dict(points)
    steps, values = sorted(last), [last[step] for step in sorted(last)]
    return steps, [float(np.mean(values[max(0, end - WINDOW_STEPS) : end])) for end in range(1, len(values) + 1)]


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Does a run survive the random death of everything?")
    parser.add_argument("config", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of faults, after the first version (10)")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="time between faults, about (10)")
    parser.add_argument("--unbroken", type=int, default=3, metavar="N", help="runs to compare with (3)")
    parser.add_argument("--roles", default="", help="roles to hit, as their processes are titled (all)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"kinds of faults, of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="folder to write the runs to (a temporary folder)")
    parser.add_argument("--out", type=Path, help="file of the picture of the rewards")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
