"""`mrl eval WHAT ... [--samples N] [--k K,...]`: measure policies on held-out prompts, with several answers to each.

WHAT is a run (its learning policies at their newest checkpoints), RUN@STEP, a model folder, or a model of the hub.
Tasks, pool and verifiers are those of the first run, or of `--config`. `mrl eval --compare A.json B.json` prints the
differences between two evaluations of the same prompts.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mrl.config.load import load_config
from mrl.config.nearest_key import nearest
from mrl.config.rules.evaluation_rules import check_draws, greedy_note
from mrl.config.run_folder import is_run, read_run_config
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError, in_place
from mrl.report.comparing.grid import Grid, rich_table
from mrl.report.comparison_table import difference_grid, evaluation_grids

if TYPE_CHECKING:
    from mrl.tasks.pool import Prompt, TaskPool

TELL_AGAIN_S = 5.0
WHERE = "mrl eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: policies, prompts, number and sampling of answers, and place of the result."""
    parser.add_argument("what", nargs="*", metavar="WHAT", help="RUN, RUN@STEP, a model folder, or a hub id")
    parser.add_argument("--policy", default="", metavar="NAME", help="measure only this policy of each run")
    parser.add_argument("--config", metavar="FILE", help="tasks and pool: a TOML file, `quickstart`, or a run's folder")
    parser.add_argument("--tasks", default="", metavar="A,B", help="evaluate only prompts of these tasks")
    parser.add_argument(
        "--prompts",
        type=int,
        default=0,
        metavar="N",
        help="evaluate only the first N held-out prompts; 0, the default: all",
    )
    parser.add_argument("--samples", type=int, metavar="N", help="answers per prompt (default: evaluation.samples)")
    parser.add_argument("--k", metavar="K,K", help="values of k in pass@k (default: evaluation.k)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature, 0 for greedy (default: evaluation.temperature)",
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling (default: evaluation.top_p)")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="token limit of an answer; default: the policy's"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the answers (default: run.seed)")
    parser.add_argument(
        "--engine", default="", choices=("embedded", "vllm", "sglang"), help="engine; default: the policy's"
    )
    parser.add_argument("--device", default="", choices=("cpu", "cuda"), help="device; default: the policy's")
    parser.add_argument("--out", type=Path, metavar="PATH", help="file or folder of the result; default: RUN/evals")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="print the differences between two results, B minus A",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables and keep the result; or compare two kept results."""
    if arguments.compare:
        return _compare(*arguments.compare)
    if not arguments.what:
        raise ConfigError("nothing to evaluate", where=WHERE, wanted="a run, a model folder, or a model of the hub")
    _check_out(arguments.out)
    from mrl.processes.evaluation.measuring import HeldOutQuestions, engine_table, evaluate
    from mrl.processes.evaluation.saved_evaluations import save_evaluation
    from mrl.processes.evaluation.subjects import base_config, find_subjects
    from mrl.tasks.pool import build_pool

    config = _with_own(base_config(arguments.what, _given(arguments.config)), arguments)
    _check_tasks(config, arguments.tasks)
    found = find_subjects(arguments.what, config, policy=arguments.policy, tell=_tell)
    changes = {"engine": arguments.engine, "device": arguments.device, "max_new_tokens": arguments.max_new_tokens or 0}
    subjects = [replace(subject, table=engine_table(subject.table, **changes)) for subject in found]
    pool = build_pool(config.tasks, config.pool)
    try:
        prompts = _prompts(pool, arguments)
        if note := greedy_note(config.evaluation.temperature, config.evaluation.samples):
            _tell(f"note: {note}")
        _quiet_logs()
        with tempfile.TemporaryDirectory(prefix="mrl-eval-") as scratch:
            evaluation = evaluate(subjects, HeldOutQuestions(config, pool, prompts, _Progress()), Path(scratch))
    finally:
        pool.close()
    _print(evaluation_grids(evaluation))
    print(f"wrote {save_evaluation(evaluation, arguments.out or _place(arguments.what))}")
    return 0


def _check_out(out: Path | None) -> None:
    """Raises ConfigError where the result could not be written, before hours of measuring."""
    if out is None:
        return
    is_file = out.suffix == ".json"
    if is_file and not out.absolute().parent.is_dir():
        raise ConfigError("--out: no such folder", where=WHERE, got=str(out.parent))
    if is_file and out.is_dir():
        raise ConfigError("--out: a folder stands where the file would be", where=WHERE, got=str(out))
    if not is_file and out.exists() and not out.is_dir():
        raise ConfigError(
            "--out: a file, not a folder", where=WHERE, got=str(out), wanted="a file NAME.json, or a folder"
        )


def _compare(first: Path, second: Path) -> int:
    from mrl.processes.evaluation.saved_evaluations import differences

    rows = [(one.policies, one.k, one.before, one.after, one.difference) for one in differences(first, second)]
    _print([difference_grid(f"A = {first}, B = {second}; 95 % intervals over prompts", rows)])
    return 0


def _given(words: str | None) -> RunConfig | None:
    """Return the configuration of `--config`, with its data sets fetched and keys that were left out filled in."""
    from mrl.processes.preparation.completion import complete
    from mrl.processes.preparation.hub_data import fetched_data, pinned_data
    from mrl.processes.preparation.hub_models import located

    if words is None:
        return None
    if is_run(Path(words)):
        return located(read_run_config(Path(words)))
    config = pinned_data(load_config(config_file(words)), where=words, earlier=None, on_note=_tell)
    return complete(fetched_data(config, where=words, tell=_tell)).config


def _with_own(config: RunConfig, arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration with the command line's values. Raises ConfigError for an invalid value."""
    given = {"samples": arguments.samples, "temperature": arguments.temperature, "top_p": arguments.top_p}
    given["k"] = None if arguments.k is None else _numbers(arguments.k)
    table = config.evaluation.model_copy(update={key: value for key, value in given.items() if value is not None})
    tokens = arguments.max_new_tokens
    bounds = (
        ("--samples", table.samples, 1 <= table.samples <= 1024, "1 to 1024"),
        ("--temperature", table.temperature, table.temperature is None or 0 <= table.temperature <= 2, "0 to 2"),
        ("--top-p", table.top_p, 0 < table.top_p <= 1, "above 0, and at most 1"),
        ("--prompts", arguments.prompts, arguments.prompts >= 0, ">= 0"),
        ("--max-new-tokens", tokens, tokens is None or tokens >= 1, ">= 1"),
        ("--seed", arguments.seed, arguments.seed is None or 0 <= arguments.seed < 2**31, "0 to 2147483647"),
    )
    for key, value, is_sound, wanted in bounds:
        if not is_sound:
            raise ConfigError(f"{key}: invalid value", where=WHERE, got=value, wanted=wanted)
    with in_place(WHERE):
        check_draws(table.samples, table.k, key="--k")
    seed = config.run.seed if arguments.seed is None else arguments.seed
    run_table = config.run.model_copy(update={"seed": seed})
    return config.model_copy(update={"evaluation": table, "run": run_table})


def _numbers(words: str) -> list[int]:
    parts = words.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError("--k: invalid value", where=WHERE, got=words, wanted="whole numbers, separated by commas")
    return [int(part) for part in parts]


def _check_tasks(config: RunConfig, words: str) -> None:
    for task in filter(None, words.split(",")):
        if task not in config.tasks:
            near = nearest(task, config.tasks)
            raise ConfigError(
                "--tasks: no such task",
                where=WHERE,
                got=task,
                wanted=" or ".join(config.tasks),
                cure=f"did you mean {near}?" if near else "",
            )
    for task in filter(None, words.split(",")) if words else config.tasks:
        if config.tasks[task].source == "agent":
            raise ConfigError(
                f"tasks.{task}: tasks of agents are evaluated only within a run",
                where=WHERE,
                got='source = "agent"',
                cure="select other tasks with --tasks; the report of a run shows its results on this task",
            )


def _prompts(pool: "TaskPool", arguments: argparse.Namespace) -> "Sequence[Prompt]":
    """Return held-out prompts of the tasks asked for: no policy of the run has trained on them."""
    tasks = {task for task in arguments.tasks.split(",") if task}
    found = [prompt for prompt in pool.held_out if not tasks or prompt.task in tasks]
    if not found:
        cure = "set pool.held_out_prompts above 0 in the configuration"
        raise ConfigError("there are no held-out prompts", where=WHERE, got=arguments.tasks, cure=cure)
    return found[: arguments.prompts or None]


def _place(what: Sequence[str]) -> Path:
    """Return the default folder of the result: in the first run, else in the working folder."""
    from mrl.processes.evaluation.subjects import run_of

    runs = [found[0] for found in map(run_of, what) if found is not None]
    return runs[0] / "evals" if runs else Path("evals")


def _print(grids: Sequence[Grid]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for grid in grids:
        console.print(rich_table(grid))


def _quiet_logs() -> None:
    """Send warnings of verifiers and engines to stderr, in the form of all logs."""
    from mrl.metrics.logging import configure_logging

    configure_logging("eval")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Prints a line on stderr every few seconds, and at the end of every policy."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, label: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done == total or now_s - self._told_s >= TELL_AGAIN_S:
            self._told_s = now_s
            _tell(f"{label}: {done} of {total} answers")
