"""`mrl compare CONFIG --regimes A,B,... --seeds N`: one configuration under several sharing regimes, measured alike.

Every run is CONFIG with `--sharing.regime R --run.seed S`, written to `FOLDER/R-S.toml` and trained in `FOLDER/R-S`:
same prompts, same initial policies, same number of steps and own answers; synchronous unless `--async`. A frozen policy
is left out of the runs whose regime never asks it. Finished runs are not repeated and begun runs are resumed, so that
the command can be called again after any interruption. Table, figure and numbers are written beside the runs. With
`--tune N` each regime first chooses among N configurations, on other seeds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError, RoleFailed
from mrl.files import replace_file
from mrl.host_memory import host_memory_bytes
from mrl.processes.preparation.comparison_plan import PlannedRun, check_earlier, check_folder, check_given, plan_runs

if TYPE_CHECKING:
    from mrl.report.comparing.grid import Grid
    from mrl.report.comparison import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: configuration, regimes, seeds, tuning, and place of the runs."""
    parser.add_argument("config", type=config_file, metavar="CONFIG", help="TOML file, or `quickstart`")
    parser.add_argument(
        "--regimes",
        default="independent,sgt",
        help="regimes, separated by commas, the baseline first; sgt-reported is sgt with the lambda that papers report",
    )
    parser.add_argument(
        "--seeds",
        default=None,
        help="number of seeds, or a list of seeds: 11,12,13 (`11,` is one seed); default: 3 seeds, 8 with --tune",
    )
    parser.add_argument(
        "--tune",
        type=int,
        nargs="?",
        const=16,
        default=None,
        metavar="N",
        help="first choose among N configurations of each regime (default 16), by successive halving",
    )
    parser.add_argument(
        "--tune-seeds", default=None, help="seeds of the tuning, written as in --seeds; default: 1001,1002"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder to write the runs to; default: runs/compare-NAME"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, help="runs at once; default: as many as cores, memory and GPUs allow"
    )
    parser.add_argument("--async", dest="is_async", action="store_true", help="let each policy train at its own pace")
    parser.add_argument("--only-table", action="store_true", help="train nothing; compare the runs that exist")


def run(arguments: argparse.Namespace) -> int:
    """Train missing runs, then write and print the comparison. Finished runs alone need neither models nor GPUs."""
    if arguments.jobs < 0:
        raise ConfigError("invalid number of runs", where="--jobs", got=arguments.jobs, wanted=">= 1, or 0 to choose")
    if arguments.tune_seeds is not None and arguments.tune is None:
        raise ConfigError(
            "has no effect without --tune", where="--tune-seeds", cure="add --tune, or remove --tune-seeds"
        )
    check_given(arguments)
    check_folder(arguments)
    train = partial(_train, jobs=arguments.jobs, where=str(arguments.config), is_only_table=arguments.only_table)
    if arguments.tune is None:
        runs = plan_runs(arguments)
        train(runs)
        return conclude(runs)
    return _tuned(arguments, train)


def _tuned(arguments: argparse.Namespace, train: Callable[[Sequence[PlannedRun]], None]) -> int:
    """Tune, then compare the chosen configurations; while tuning is not done, print the table so far and return 1."""
    from mrl.processes.preparation import tuning

    tuned = tuning.tune(arguments, train, on_rung=lambda line: print(line, flush=True))
    chosen = tuned.chosen()
    tables, told = [tuning.grid(tuned)], [f"tuned by {tuning.RULE}"]
    if not chosen:
        _show(
            tables, [f"tuning is not finished; runs left before the final ones: {tuning.runs_to_go(arguments, tuned)}"]
        )
        return 1
    runs = plan_runs(arguments, {row: one.words for row, one in chosen.items()})
    train(runs)
    return conclude(runs, tables, told + [f"{row}: {tuning.told(one)}" for row, one in chosen.items()])


def _train(runs: Sequence[PlannedRun], *, jobs: int, where: str, is_only_table: bool = False) -> None:
    if is_only_table or not runs:
        return
    from mrl.memory_plan.fitting import fitted_to_memory
    from mrl.memory_plan.needs import MIB
    from mrl.memory_plan.run_memory import run_need
    from mrl.processes.planning.plan import planned
    from mrl.processes.preparation.comparison_training import FreeMachine, lanes, train_missing
    from mrl.processes.preparation.preflight import preflight

    host_mib = host_memory_bytes() / MIB
    # A run fits its configuration to this host's memory at its start; its folder and file keep it as planned.
    plain = {one.folder.name.rpartition("-")[0]: one.config for one in runs}.values()
    configs = [fitted_to_memory(config, planned(config), host_mib).config for config in plain]
    for config in configs:
        preflight(config, where=where)
    check_earlier(runs)
    train_missing(runs, lanes(FreeMachine.here(), [run_need(config) for config in configs], jobs=jobs))


def conclude(runs: Sequence[PlannedRun], before: Sequence["Grid"] = (), told_before: Sequence[str] = ()) -> int:
    """Write and print tables of the finished runs; return 1 unless all finished. Raises RoleFailed when none did."""
    from mrl.report.comparing.grid import markdown
    from mrl.report.comparison import Comparison, read_outcome
    from mrl.report.comparison_table import as_json, grids

    folder = runs[0].folder.parent
    done = [one for one in runs if one.state().is_done]
    if not done:
        raise RoleFailed(f"no run has finished; see {folder}/*.log")
    outcomes = {
        regime: {one.seed: read_outcome(one.folder) for one in done if one.regime == regime}
        for regime in dict.fromkeys(one.regime for one in runs if one in done)
    }
    comparison = Comparison(outcomes, baseline=runs[0].regime)
    tables, told = [*before, *grids(comparison)], [*told_before, *notes(runs, done)]
    _show(tables, told)
    texts = [*map(markdown, tables), *(f"{note}\n" for note in told)]
    replace_file(folder / "comparison.md", "\n".join(texts).encode())
    replace_file(folder / "comparison.json", json.dumps(as_json(comparison), indent=1, allow_nan=False).encode())
    written = ["comparison.md", "comparison.json", *_draw(comparison, folder)]
    print("wrote " + ", ".join(str(folder / name) for name in written))
    return 0 if len(done) == len(runs) else 1


def _show(tables: Sequence["Grid"], told: Sequence[str]) -> None:
    from mrl.report.comparing.grid import rich_table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for grid in tables:
        console.print(rich_table(grid))
    for note in told:
        print(note)


def notes(runs: Sequence[PlannedRun], done: Sequence[PlannedRun]) -> list[str]:
    """Return notes on the tables: policies left out of some runs, missing runs and missing differences."""
    left_out = {one.regime: ", ".join(one.left_out) for one in runs if one.left_out}
    told = [
        f"{regime}: runs without {names} (frozen), which this regime never uses" for regime, names in left_out.items()
    ]
    told += [f"not in the tables: {one.folder} (the run did not finish)" for one in runs if one not in done]
    baseline = runs[0].regime
    if not any(one.regime == baseline for one in done):
        told.append(f"no differences: no run of the baseline {baseline} has finished")
    return told


def _draw(comparison: "Comparison", folder: Path) -> list[str]:
    try:
        from mrl.report.comparison_figure import learning_curves
    except ModuleNotFoundError:
        print("no figure: matplotlib is missing; pip install 'mrl[plots]'")
        return []
    replace_file(folder / "comparison.png", learning_curves(comparison))
    return ["comparison.png"]
