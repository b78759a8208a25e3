"""The one list of task sources."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mrl.config.schema import TaskTable
from mrl.errors import MissingError, TaskError
from mrl.hub_names import Name, listing_file, parse_name, snapshot
from mrl.tasks.benchmarks.benchmark_source import BenchmarkSource
from mrl.tasks.benchmarks.catalogue import BENCHMARKS, benchmark_of
from mrl.tasks.data_rows import JSONL, PARQUET, README, Split, split_files
from mrl.tasks.environments.environment_source import EnvironmentSource
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
}
"""Name -> (dataset, options, *, seed, where, get) -> Source. A new source is one file and one line here."""

OF_ROWS = ("jsonl", "math")
"""Those that read files."""
BENCHMARK = "benchmark"
"""The source whose data sets are those of `BENCHMARKS`."""


def open_source(task: str, table: TaskTable, *, seed: int) -> Source:
    """The data set behind one task of the configuration, judged by the task's own verifier where it names one.

    Raises TaskError when there is no such thing, or its answers are evaluated and this host cannot seal a process;
    MissingError when it is still to be fetched.
    """
    dataset, make = _located(task, table), SOURCES.get(table.source)
    make = make or partial(BenchmarkSource, benchmark_of(table.dataset, where=f"tasks.{task}.dataset"))
    source = make(dataset, table.options, seed=seed, where=f"tasks.{task}", get=table.get)
    source.verifier = table.verifier or source.verifier
    sealing_of(task, table, evaluates=source.evaluates)
    return source


def data_name(table: TaskTable) -> Name | None:
    """The data set of the hub that a task takes, at its commit as far as that is known; None for files and folders."""
    if table.source == BENCHMARK:
        benchmark = BENCHMARKS.get(table.dataset)
        if benchmark is None or table.options.get("data"):
            return None
        return Name(benchmark.dataset, table.commit or table.revision, "dataset")
    place = Path(table.dataset)
    if table.source not in OF_ROWS or place.exists() or table.dataset.endswith((PARQUET, *JSONL)):
        return None
    if place.parent != Path() and place.parent.is_dir():
        return None  # a name misspelt below a folder of this machine, and no id
    found = parse_name(table.dataset, table.revision)
    return found and Name(found.id, table.commit or found.revision, "dataset")


def splits_of(table: TaskTable) -> list[Split]:
    """The splits that a task reads of a folder."""
    if table.source == BENCHMARK:
        benchmark = BENCHMARKS[table.dataset]
        return [Split(name, benchmark.subset) for name in (benchmark.held_out, benchmark.train) if name]
    subset, held_out = str(table.options.get("subset", "")), str(table.options.get("held_out", ""))
    names = (str(table.options.get("split", "train")), held_out)
    return [Split(name, subset) for name in names if name]


def is_data_here(table: TaskTable) -> bool:
    """Whether all files that a task reads of a data set of the hub are in the hub's cache.

    Of one that others than `mrl fetch` put there nobody knows what files it has; what is there counts.
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


def _listed(name: Name) -> list[str]:
    """The files that a data set has on the hub at its commit; none where that has not been noted."""
    try:
        return list(json.loads(listing_file(name).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []


def _located(task: str, table: TaskTable) -> str:
    """The file or folder of a task's data. Raises MissingError for a data set of the hub that is to be fetched."""
    name = data_name(table)
    if name is None:
        return str(table.options.get("data") or table.dataset) if table.source == BENCHMARK else table.dataset
    if not is_data_here(table):
        cure = table.get or "mrl fetch, with this configuration"
        raise MissingError(f"the data set {name} is not there", where=f"tasks.{task}", cure=cure)
    return str(snapshot(name))
