#!/usr/bin/env python3
"""Does training notice that the exchange is killed? One run unbroken, one whose daemon gets kill -9 again and again.

    .venv/bin/python tools/kill_exchange.py CONFIG [--times 10] [--every 15] [--unbroken 1] [--runs FOLDER] [--out PNG]

Both runs have the same configuration and seed and run one after the other, asynchronously, so that they differ a little
in any case: --unbroken N makes N unbroken runs, whose spread is what the killed one is to be compared with. Prints
kills, restarts and accuracies, and draws the rewards by step. Ends with one line of JSON; exit code 1 when the killed
run did not end by itself, or its accuracy lies outside the spread of the unbroken ones by more than 0.1.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from mrl.metrics.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
WINDOW_STEPS = 10
SLACK = 0.1


class Ended(NamedTuple):
    """A run that is over."""

    name: str
    code: int
    kills: int
    rewards: dict[str, list[tuple[int, float]]]
    """Policy -> (step, mean reward)."""
    accuracy: float
    """On held-out prompts at the end, mean over policies."""


def main() -> int:
    asked = arguments()
    folder = asked.runs or Path(tempfile.mkdtemp(prefix="kill_exchange_"))
    whole = [run(asked, folder, f"unbroken-{number}", 0) for number in range(1, asked.unbroken + 1)]
    killed = run(asked, folder, "killed", asked.times)
    for one in (*whole, killed):
        print(f"{one.name:12} exit code {one.code}, {one.kills:2} kills, accuracy at the end {one.accuracy:.3f}")
    draw(whole, killed, asked.out)
    low, high = min(one.accuracy for one in whole) - SLACK, max(one.accuracy for one in whole) + SLACK
    is_ok = killed.code == 0 and killed.kills == asked.times and low <= killed.accuracy <= high
    row = {
        "name": f"accuracy, exchange killed {killed.kills} times", "value": killed.accuracy, "unit": "share",
        "against": f"{len(whole)} unbroken", "ratio": killed.accuracy / mean(one.accuracy for one in whole),
        "required": f"within {low:.3f} and {high:.3f}", "ok": is_ok,
    }  # fmt: skip
    print(json.dumps({"bench": "kill_exchange", "rows": [row]}))
    return 0 if is_ok else 1


def run(asked: argparse.Namespace, folder: Path, name: str, times: int) -> Ended:
    """One training run, its daemon killed so often; an unbroken one that is there already counts."""
    if not times and (folder / name / "report.html").exists():
        return ended(folder / name, name, 0, 0)
    argv = [sys.executable, "-m", "mrl", "train", str(asked.config), "--run.name", name, "--run.folder", str(folder)]
    with (
        (folder / f"{name}.log").open("wb") as log,
        subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT) as process,
    ):
        draw_s, kills, last = random.Random(0), 0, 0
        next_s = time.monotonic() + asked.every
        while process.poll() is None:
            time.sleep(0.2)
            if kills < times and time.monotonic() >= next_s and (pid := daemon_pid(folder / name)) not in (0, last):
                os.kill(pid, signal.SIGKILL)
                kills, last = kills + 1, pid
                next_s = time.monotonic() + asked.every * draw_s.uniform(0.9, 1.1)
    return ended(folder / name, name, process.returncode, kills)


def daemon_pid(run_folder: Path) -> int:
    """The pid that the daemon has published; 0 when it does not live."""
    try:
        pid = int(json.loads((run_folder / "endpoints" / "exchange.json").read_text())["pid"])
        return pid if b"mrl::exchange" in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
    except (OSError, ValueError, KeyError):
        return 0


def ended(run_folder: Path, name: str, code: int, kills: int) -> Ended:
    """What the metrics of a run say."""
    rewards: dict[str, list[tuple[int, float]]] = {}
    accuracies: dict[str, float] = {}
    for line in read_metrics(run_folder / "metrics.jsonl"):
        values: dict[str, Any] = line.get("values", {})
        if "reward/mean" in values:
            rewards.setdefault(line["policy"], []).append((line["step"], values["reward/mean"]))
        if "eval/accuracy" in values:
            accuracies[line["policy"]] = values["eval/accuracy"]
    return Ended(name, code, kills, rewards, mean(accuracies.values()) if accuracies else 0.0)


def draw(whole: list[Ended], killed: Ended, path: Path | None) -> None:
    """Rewards by step, a panel for each policy."""
    if path is None:
        return
    policies = sorted(killed.rewards)
    figure, panels = plt.subplots(1, len(policies), figsize=(4.5 * len(policies), 3.2), sharey=True, squeeze=False)
    for panel, policy in zip(panels[0], policies, strict=True):
        for one in whole:
            panel.plot(*smooth(one.rewards[policy]), color="0.6", lw=1, label="unbroken" if one is whole[0] else None)
        panel.plot(*smooth(killed.rewards[policy]), color="C3", lw=1.6, label=f"exchange killed {killed.kills} times")
        panel.set(title=policy, xlabel="step")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"mean reward of a batch, over {WINDOW_STEPS} steps")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smooth(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps, and means over the last few of them."""
    steps, values = zip(*points, strict=True)
    return list(steps), [float(np.mean(values[max(0, end - WINDOW_STEPS) : end])) for end in range(1, len(values) + 1)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does training notice that the exchange is killed?")
    parser.add_argument("config", type=Path)
    parser.add_argument("--times", type=int, default=10, help="kills (default: 10)")
    parser.add_argument(
        "--every",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="between them, about (default: 15); a supervisor gives up after 5 restarts within 60 s",
    )
    parser.add_argument("--unbroken", type=int, default=1, help="runs to compare with (default: 1)")
    parser.add_argument("--runs", type=Path, help="where the runs go (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="picture of the rewards")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
