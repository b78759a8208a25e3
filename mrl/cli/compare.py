"""`mrl compare CONFIG --regimes A,B,... --seeds N`: one configuration under several sharing regimes, measured alike.

Every run is CONFIG with `--sharing.regime R --run.seed S`, written to `FOLDER/R-S.toml` and trained in `FOLDER/R-S`:
same prompts, same initial policies, same number of steps and own answers; synchronous unless `--async`. A frozen policy
is left out of the runs whose regime never asks it. Finished runs are not repeated and begun ones are resumed, so that
the command can be called again after anything. Table, figure and numbers are written beside the runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from mrl.config.load import load_config
from mrl.config.run_folder import read_run_config
from mrl.config.schema import RunConfig
from mrl.config.toml_text import config_toml
from mrl.errors import ConfigError, RoleFailed, RunFolderError
from mrl.files import replace_file
from mrl.launch.log_lines import reason_in
from mrl.parent_death import command

MIB_PER_RUN = 3_000
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of the comparison."""

    regime: str
    seed: int
    folder: Path
    config: RunConfig
    left_out: tuple[str, ...] = ()
    """Frozen policies of the comparison that this regime has no use for."""

    @property
    def config_toml(self) -> Path:
        """The configuration, as `mrl train` takes it."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def output(self) -> Path:
        """What `mrl train` printed last."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def is_done(self) -> bool:
        """Whether this very configuration ran to its end."""
        last = [self.folder / "evaluation" / f"{name}-{self.config.run.steps}.json" for name in _learning(self.config)]
        return self._is_same() and all(path.exists() for path in last)

    @property
    def can_resume(self) -> bool:
        """Whether it was begun and every policy has a checkpoint."""
        checkpoints = [self.folder / "checkpoints" / name for name in _learning(self.config)]
        return self._is_same() and all(any(path.glob("step_*")) for path in checkpoints)

    @property
    def is_foreign(self) -> bool:
        """Whether its folder holds a run of another configuration."""
        return self._earlier() is not None and not self._is_same()

    def _earlier(self) -> RunConfig | None:
        try:
            return read_run_config(self.folder)
        except RunFolderError:
            return None

    def _is_same(self) -> bool:
        """Models are resolved when a run starts, and left out."""
        earlier = self._earlier()
        if earlier is None:
            return False
        wanted = self.config.policies
        policies = {
            name: table.model_copy(update={"model": wanted[name].model}) if name in wanted else table
            for name, table in earlier.policies.items()
        }
        return earlier.model_copy(update={"policies": policies}) == self.config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare, on how many seeds, where."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the runs")
    parser.add_argument("--regimes", default="independent,sgt", help="names, the first one is the baseline")
    parser.add_argument("--seeds", default="3", help="how many (1, 2, ...), or the seeds themselves: 11,12,13")
    parser.add_argument("--folder", type=Path, default=None, help="where the runs go; default runs/compare-NAME")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; default: what cores and memory allow")
    parser.add_argument("--async", dest="is_async", action="store_true", help="policies go at their own pace")
    parser.add_argument("--only-table", action="store_true", help="train nothing, show what is there")


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, then write and print the comparison."""
    from mrl.cli.preflight import preflight

    if arguments.jobs < 0:
        raise ConfigError("not a number of runs", where="--jobs", got=arguments.jobs, wanted=">= 1, or 0 to choose")
    runs = plan(arguments)
    for one in {one.regime: one for one in runs}.values():
        preflight(one.config, where=str(arguments.config))
    folder = runs[0].folder.parent
    if not arguments.only_table:
        check_earlier(runs)
        _train_all(runs, jobs=arguments.jobs or min(_jobs(one.config) for one in runs))
    return _conclude(runs, folder)


def plan(arguments: argparse.Namespace) -> list[Run]:
    """All runs, seed by seed, so that every regime has some early. Raises ConfigError for mistaken arguments."""
    regimes, seeds = arguments.regimes.split(","), _seeds(arguments.seeds)
    name = load_config(arguments.config, [*arguments.overrides, "--sharing.regime", regimes[0]]).run.name
    folder = arguments.folder or Path("runs") / f"compare-{name}"
    return [_plan_one(arguments, folder, regime, seed) for seed in seeds for regime in dict.fromkeys(regimes)]


def _plan_one(arguments: argparse.Namespace, folder: Path, regime: str, seed: int) -> Run:
    from mrl.cli.preflight import unasked

    name = f"{regime}-{seed}"
    chosen = ["--run.folder", str(folder), "--run.name", name, "--run.seed", str(seed), "--sharing.regime", regime]
    chosen += ["--run.sync", "false" if arguments.is_async else "true"]
    config = load_config(arguments.config, [*arguments.overrides, *chosen])
    left_out = tuple(unasked(config, where=str(arguments.config)))
    policies = {policy: table for policy, table in config.policies.items() if policy not in left_out}
    return Run(regime, seed, folder / name, config.model_copy(update={"policies": policies}), left_out)


def check_earlier(runs: Sequence[Run]) -> None:
    """Raises ConfigError when a run would take the place of one of another configuration, which may have cost hours."""
    foreign = [str(one.folder) for one in runs if one.is_foreign]
    if foreign:
        raise ConfigError(
            "holds a run of another configuration", where=foreign[0], cure="name another --folder, or delete this one"
        )


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or numbers == [0]:
        raise ConfigError("not a number of seeds", where="--seeds", got=text, wanted="3, or a list as 11,12,13")
    return list(dict.fromkeys(numbers)) if "," in text else list(range(1, numbers[0] + 1))


def _learning(config: RunConfig) -> list[str]:
    return [name for name, table in config.policies.items() if not table.frozen]


def _jobs(config: RunConfig) -> int:
    """Runs at once: a core per policy and memory for each; one where there is a GPU to share."""
    if any(table.device != "cpu" for table in config.policies.values()):
        return 1
    by_cores = (os.cpu_count() or 1) // len(config.policies)
    by_memory = int(psutil.virtual_memory().available / (1024 * 1024) / MIB_PER_RUN)
    return max(1, min(by_cores, by_memory))


def _train_all(runs: Sequence[Run], *, jobs: int) -> None:
    """Every missing run, `jobs` at a time. A signal that ends this process ends the runs first."""
    missing = [one for one in runs if not one.is_done]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} done before, {jobs} at once", flush=True)
    waiting, running = deque(missing), dict[subprocess.Popen[bytes], Run]()
    started_s, done = time.monotonic(), 0
    with _terminated_as_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = waiting.popleft()
                    running[_start(one)] = one
                time.sleep(POLL_S)
                for process in [process for process in running if process.poll() is not None]:
                    done += 1
                    minutes = (time.monotonic() - started_s) / 60
                    _tell(running.pop(process), process.returncode, minutes, minutes / done * (len(missing) - done))
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", flush=True)
            raise
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _tell(one: Run, code: int, minutes: float, minutes_left: float) -> None:
    outcome = "done"
    if code:
        reason = reason_in(one.output.read_text(errors="replace").splitlines())
        outcome = f"failed with exit code {code} ({reason}), see {one.output} and {one.folder / 'logs'}"
    print(f"{one.folder}: {outcome}; {minutes:.1f} minutes, about {minutes_left:.0f} left", flush=True)


def _start(one: Run) -> subprocess.Popen[bytes]:
    """Begin or resume a run; it dies with this process, so that no later call finds it still going on."""
    how = "--resume" if one.can_resume else "--clean"
    one.config_toml.parent.mkdir(parents=True, exist_ok=True)
    replace_file(one.config_toml, config_toml(one.config).encode())
    argv = (sys.executable, "-m", "mrl", "train", how, str(one.config_toml))
    with one.output.open("wb") as log:
        return subprocess.Popen(
            command(os.getpid(), argv), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that what was started is ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _conclude(runs: Sequence[Run], folder: Path) -> int:
    from mrl.report.comparison import Comparison, read_outcome
    from mrl.report.comparison_table import as_json, grids, markdown, rich_table

    done = [one for one in runs if one.is_done]
    if not done:
        raise RoleFailed(f"no run has come to its end, see {folder}/*.log")
    comparison = Comparison(
        {
            regime: {one.seed: read_outcome(one.folder) for one in done if one.regime == regime}
            for regime in dict.fromkeys(one.regime for one in runs if one in done)
        }
    )
    tables, told = grids(comparison), notes(runs, done)
    console = Console(width=None if sys.stdout.isatty() else 140)
    for grid in tables:
        console.print(rich_table(grid))
    for note in told:
        print(note)
    texts = [*map(markdown, tables), *(f"{note}\n" for note in told)]
    replace_file(folder / "comparison.md", "\n".join(texts).encode())
    replace_file(folder / "comparison.json", json.dumps(as_json(comparison), indent=1).encode())
    written = ["comparison.md", "comparison.json", *_draw(comparison, folder)]
    print("wrote " + ", ".join(str(folder / name) for name in written))
    return 0 if len(done) == len(runs) else 1


def notes(runs: Sequence[Run], done: Sequence[Run]) -> list[str]:
    """What a reader of the tables must know of the runs: policies left out of some, and runs that are missing."""
    left_out = {one.regime: ", ".join(one.left_out) for one in runs if one.left_out}
    told = [f"{regime}: without {names} (frozen), which it never asks" for regime, names in left_out.items()]
    return told + [f"not in the tables: {one.folder} did not come to its end" for one in runs if one not in done]


def _draw(comparison: object, folder: Path) -> list[str]:
    try:
        from mrl.report.comparison_figure import learning_curves
    except ModuleNotFoundError:
        print("no figure: matplotlib is missing; pip install 'mrl[plots]'")
        return []
    replace_file(folder / "comparison.png", learning_curves(comparison))  # type: ignore[arg-type]
    return ["comparison.png"]
