"""All sources of tasks by name, and the data set behind a task of the configuration."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mrl.config.task_tables import TaskTable
from mrl.errors import MissingError, PluginError, TaskError, UserError
from mrl.hub_names import HubName, listing_file, parse_name, snapshot
from mrl.plugins import SOURCE, find_plugin, load_plugin, missing_names, raised_at
from mrl.tasks.benchmarks.benchmark_source import BenchmarkSource
from mrl.tasks.benchmarks.catalogue import BENCHMARKS, benchmark_of
from mrl.tasks.data_rows import JSONL, PARQUET, README, Split, split_files
from mrl.tasks.environments.environment_source import AgentSource, EnvironmentSource
from mrl.tasks.jsonl_source import JsonlSource
from mrl.tasks.math_source import MathSource
from mrl.tasks.reasoning_gym_source import ReasoningGymSource
from mrl.tasks.sealed.sealing import sealing_of
from mrl.tasks.source import Source
from mrl.tasks.words import WordSource

SOURCES: dict[str, Callable[..., Source]] = {
    "reasoning_gym": ReasoningGymSource,
    "words": WordSource,
    "math": MathSource,
    "jsonl": JsonlSource,
    "environment": EnvironmentSource,
    "agent": AgentSource,
}
"""Name -> (dataset, options, *, seed, where, get) -> Source. A new source is one file and one line here."""

CONTRACT = ("is_finite", "verifier", "evaluates", "items", "extract", "verifier_reference", "score")
"""Attributes that a plug-in's source needs, as `mrl.tasks.source.Source` has them."""
OF_ROWS = ("jsonl", "math")
"""Sources that read files."""
BENCHMARK = "benchmark"
"""The source whose data sets are those of `BENCHMARKS`."""


def open_source(task: str, table: TaskTable, *, seed: int) -> Source:
    """Open the data set of one task of the configuration, judged by the task's own verifier where it names one.

    Raises TaskError when the data set does not exist, or its answers are evaluated and this host cannot seal a process;
    PluginError for a plug-in that is no source; MissingError when the data set is still to be fetched.
    """
    dataset, make = _located(task, table), SOURCES.get(table.source)
    if make is None and table.source == BENCHMARK:
        make = partial(BenchmarkSource, benchmark_of(table.dataset, where=f"tasks.{task}.dataset"))
    given = {"seed": seed, "where": f"tasks.{task}", "get": table.get}
    source = make(dataset, table.options, **given) if make else _of_plugin(task, table, given)
    source.verifier = table.own_verifier or source.verifier
    sealing_of(task, table, evaluates=source.evaluates)
    return source


def _of_plugin(task: str, table: TaskTable, given: Mapping[str, Any]) -> Source:
    """Open a plug-in's source. Any exception of its constructor but UserError is reported as the plug-in's fault."""
    where = f"tasks.{task}.source"
    plugin = find_plugin(SOURCE, table.source, (*SOURCES, BENCHMARK), where=where)
    make = load_plugin(plugin, _fault_of, where=where)
    try:
        source: Source = make(table.dataset, table.options, **given)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it is reported in one line
        what = f"{plugin.target} cannot be opened ({type(error).__name__}: {error})"
        cure = f"check {raised_at(error) or plugin.target}" + f" and tasks.{task}.options" * bool(table.options)
        raise PluginError(what, where=where, got=table.dataset, cure=cure) from None
    if lacks := missing_names(source, CONTRACT):
        what = f"{plugin.target} does not return a task source"
        raise PluginError(what, where=where, got=type(source).__name__, wanted=lacks)
    return source


def _fault_of(found: object) -> str:
    """Return what a plug-in lacks to be called as a source is; empty when nothing."""
    wanted = "a callable with the arguments (dataset, options, *, seed, where, get)"
    if not callable(found):
        return wanted
    try:
        inspect.signature(found).bind("", {}, seed=0, where="", get="")
    except TypeError as error:
        return f"{wanted}: {error}"
    except ValueError:  # a function in C may have no signature
        return ""
    return missing_names(found, CONTRACT[3:]) if isinstance(found, type) else ""


def data_name(table: TaskTable) -> HubName | None:
    """Return the hub data set that a task takes, at its commit where that is known; None for files and folders."""
    if table.source == BENCHMARK:
        benchmark = BENCHMARKS.get(table.dataset)
        if benchmark is None or table.options.get("data"):
            return None
        return HubName(benchmark.dataset, table.commit or table.revision, "dataset")
    place = Path(table.dataset)
    if table.source not in OF_ROWS or place.exists() or table.dataset.endswith((PARQUET, *JSONL)):
        return None
    if place.parent != Path() and place.parent.is_dir():
        return None  # a misspelt path below a folder of this machine, not an id
    found = parse_name(table.dataset, table.revision)
    return found and HubName(found.id, table.commit or found.revision, "dataset")


def splits_of(table: TaskTable) -> list[Split]:
    """Return the splits that a task reads from a folder."""
    if table.source == BENCHMARK:
        benchmark = BENCHMARKS[table.dataset]
        return [Split(name, benchmark.subset) for name in (benchmark.held_out, benchmark.train) if name]
    subset, held_out = str(table.options.get("subset", "")), str(table.options.get("held_out", ""))
    names = (str(table.options.get("split", "train")), held_out)
    return [Split(name, subset) for name in names if name]


def is_data_here(table: TaskTable) -> bool:
    """Whether all files that a task reads from a hub data set are in the hub's cache.

    A data set that another program than `mrl fetch` put there has no list of its files; the files that are there count.
    """
    name = data_name(table)
    folder = snapshot(name) if name is not None and name.commit else Path()
    if not name or not name.commit or not folder.is_dir():
        return False
    here = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    known = _listed(name) or sorted(here)
    readme = (folder / README).read_text(encoding="utf-8", errors="replace") if README in here else ""
    try:
        wanted = {file for split in splits_of(table) for file in split_files(known, readme, split, where="")}
    except TaskError:
        return False
    return wanted | ({README} & set(known)) <= here


def _listed(name: HubName) -> list[str]:
    """Return the files that a data set has on the hub at its commit; none where they have not been listed."""
    try:
        return list(json.loads(listing_file(name).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def _located(task: str, table: TaskTable) -> str:
    """Return the file or folder of a task's data. Raises MissingError for a hub data set that is not yet fetched."""
    name = data_name(table)
    if name is None:
        return str(table.options.get("data") or table.dataset) if table.source == BENCHMARK else table.dataset
    if not is_data_here(table):
        cure = table.get or "run `mrl fetch` with this configuration"
        raise MissingError(f"the data set {name} has not been downloaded", where=f"tasks.{task}", cure=cure)
    return str(snapshot(name))
