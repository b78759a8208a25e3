"""Train one configuration under several regimes and seeds, one run after the other, and print what sharing brings.

    python tools/compare_seeds.py configs/quickstart.toml --regimes independent,sgt --seeds 1,2,3

Every run is `mrl train CONFIG --sharing.regime R --run.seed S` in `runs/compare/R-S`; finished runs are not repeated,
so that the command can be called again. Equal budget: same steps, own rollouts and initial policies; rescue tokens are
reported. The interval is Student's t over the differences between regimes, paired by seed.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from mrl.config.load import load_config
from mrl.config.run_folder import read_run_config
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from mrl.metrics.jsonl import read_metrics

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def main() -> int:
    arguments = _arguments()
    config = load_config(arguments.config, [])
    regimes, seeds = arguments.regimes.split(","), [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        for regime in regimes:
            _train(arguments, regime, seed)
    policies, steps = list(config.policies), config.run.steps
    results = {
        (regime, seed): {p: _outcome(arguments.folder / f"{regime}-{seed}", p, steps) for p in policies}
        for regime in regimes
        for seed in seeds
    }
    _print(results, policies, regimes, seeds)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--regimes", default="independent,sgt", help="the first one is the baseline")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"))
    return parser.parse_args()


def _train(arguments: argparse.Namespace, regime: str, seed: int) -> None:
    folder = arguments.folder / f"{regime}-{seed}"
    overrides = ["--run.folder", str(arguments.folder), "--run.name", folder.name, "--run.seed", str(seed)]
    overrides += ["--sharing.regime", regime]
    if _is_done(folder, load_config(arguments.config, overrides)):
        return
    print(f"training {folder}", flush=True)
    argv = [sys.executable, "-m", "mrl", "train", str(arguments.config), "--clean", *overrides]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def _is_done(folder: Path, config: RunConfig) -> bool:
    """Whether this very configuration ran to its end; models are resolved at the start and left out."""
    try:
        earlier = read_run_config(folder)
    except RunFolderError:
        return False
    policies = {name: table.model_copy(update={"model": ""}) for name, table in earlier.policies.items()}
    last = [folder / "evaluation" / f"{name}-{config.run.steps}.json" for name in config.policies]
    return earlier.model_copy(update={"policies": policies}) == config and all(path.exists() for path in last)


def _outcome(folder: Path, policy: str, steps: int) -> dict[str, float]:
    start, end = (
        json.loads((folder / "evaluation" / f"{policy}-{step}.json").read_text())["accuracy"] for step in (0, steps)
    )
    learner = [line for line in read_metrics(folder / "metrics.jsonl") if line.get("role") == f"learner/{policy}"]
    values = [line["values"] for line in learner if "values" in line]
    return {
        "start": start,
        "end": end,
        "hit_rate": _ratio(_sum(values, "sharing/hit_prompts"), _sum(values, "sharing/asked_prompts")),
        "rescue_tokens": _sum(values, "sharing/rescue_tokens"),
        "trained_tokens": _sum(values, "tokens/trained"),
    }


def _sum(values: list[dict[str, float]], name: str) -> float:
    return sum(one.get(name, 0.0) for one in values)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _print(
    results: dict[tuple[str, int], dict[str, dict[str, float]]],
    policies: list[str],
    regimes: list[str],
    seeds: list[int],
) -> None:
    table = Table("regime", "seed", *(f"{p} {what}" for p in policies for what in ("start", "end")), "mean end")
    table.add_column("hits / asked")
    table.add_column("rescue tokens")
    for regime in regimes:
        for seed in seeds:
            found = results[regime, seed]
            numbers = [f"{found[p][what]:.3f}" for p in policies for what in ("start", "end")]
            rates = [found[p]["hit_rate"] for p in policies]
            hits = "-" if math.isnan(rates[0]) else ", ".join(f"{rate:.2f}" for rate in rates)
            rescue = sum(found[p]["rescue_tokens"] for p in policies)
            share = _ratio(rescue, sum(found[p]["trained_tokens"] for p in policies))
            table.add_row(regime, str(seed), *numbers, f"{_mean_end(found):.3f}", hits, f"{rescue:.0f} ({share:.1%})")
    console = Console(width=150)
    console.print(table)
    for regime in regimes[1:]:
        differences = [_mean_end(results[regime, s]) - _mean_end(results[regimes[0], s]) for s in seeds]
        console.print(f"{regime} - {regimes[0]}, mean over policies, paired by seed: {_interval(differences)}")


def _mean_end(found: dict[str, dict[str, float]]) -> float:
    return mean(one["end"] for one in found.values())


def _interval(differences: list[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:+.3f} (one seed, no interval)"
    half = T_95[len(differences) - 1] * stdev(differences) / math.sqrt(len(differences))
    middle = mean(differences)
    return f"{middle:+.3f}, 95 % interval [{middle - half:+.3f}, {middle + half:+.3f}], n = {len(differences)}"


if __name__ == "__main__":
    sys.exit(main())
