"""The data sets of a configuration that come from the hub: pinned to commits, fetched, found on this machine.

A task's `dataset` is a file or folder if one exists, else an id on the hub with `revision`. A pinned task also has
the `commit` of that id and revision; `config.json` keeps it, for resumption and for other hosts. Only the README and
the files of the splits that the task reads are fetched.
"""

from collections.abc import Callable
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.config.task_tables import TaskTable
from mrl.errors import ConfigError, MissingError
from mrl.hub_names import AskedBy, HubName, last_commit, snapshot
from mrl.processes.preparation.hub import HubFile, Listing, commit_of, fetch_files, keep_listing, listing_of
from mrl.tasks.data_rows import README, is_data, split_files
from mrl.tasks.sources import data_name, is_data_here, splits_of


def pinned_data(
    config: RunConfig, *, where: str, earlier: RunConfig | None, on_note: Callable[[str], None]
) -> RunConfig:
    """Return `config` with the commit of every data set of the hub, as far as it is known here; nothing is fetched.

    A task that `earlier` had by the same id and revision keeps its commit. Where the hub cannot be reached, the commit
    is that of the last fetch, and `on_note` is told. Raises UserError.
    """
    tasks, is_reached = dict(config.tasks), True
    for task, table in config.tasks.items():
        name = data_name(table)
        if name is None:
            if table.revision:
                what, wanted = f"tasks.{task}.revision: only a data set from the hub has a revision", "a hub id"
                raise ConfigError(what, where=where, got=table.dataset, wanted=wanted)
            continue
        commit = name.commit or _earlier_commit(earlier, task, table)
        if not commit and is_reached:
            try:
                commit = commit_of(name, _asked_by(task, table, where))
            except MissingError as error:
                is_reached = False
                on_note(
                    f"{error.where}: {error.what}"
                    + f" ({error.got})" * bool(error.got)
                    + "; using what was fetched last, if any"
                )
        tasks[task] = table.model_copy(update={"commit": commit or last_commit(name)})
    return config.model_copy(update={"tasks": tasks})


def fetched_data(config: RunConfig, *, where: str, tell: Callable[[str], None]) -> RunConfig:
    """Fetch all data sets of the hub; return `config`, pinned. Raises UserError for the first that cannot be had."""
    tasks = dict(config.tasks)
    for task, table in config.tasks.items():
        name = data_name(table)
        if name is None or is_data_here(table):
            continue
        asked = _asked_by(task, table, where)
        listing = listing_of(name, asked)
        pinned = name.at(listing.commit)
        keep_listing(pinned, [file for file in listing.files if is_data(file) or file == README], asked)
        files = _wanted(pinned, listing, task, table, asked)
        fetch_files(pinned, listing, files, asked, revision=table.revision, tell=tell)
        tasks[task] = table.model_copy(update={"commit": listing.commit})
    return config.model_copy(update={"tasks": tasks})


def unfetched_data(config: RunConfig) -> list[str]:
    """Return the tasks whose data set comes from the hub and is not whole on this machine."""
    return [task for task, table in config.tasks.items() if data_name(table) is not None and not is_data_here(table)]


def check_data_here(config: RunConfig, run: Path) -> None:
    """Raises MissingError for the first data set of a run that comes from the hub and is not on this host."""
    for task in unfetched_data(config):
        what = f"the data set {data_name(config.tasks[task])} is missing"
        raise MissingError(what, where=f"tasks.{task}", cure=f"mrl fetch {run} on this host")


def _wanted(pinned: HubName, listing: Listing, task: str, table: TaskTable, asked: AskedBy) -> dict[str, HubFile]:
    """Return the README and the files of the splits that a task reads. Raises TaskError for a missing split."""
    readme, told = {name: entry for name, entry in listing.files.items() if name == README}, ""
    if readme:
        fetch_files(pinned, listing, readme, asked, revision=pinned.commit, tell=lambda _: None)
        told = (snapshot(pinned) / README).read_text(encoding="utf-8", errors="replace")
    names = list(listing.files)
    found = [name for split in splits_of(table) for name in split_files(names, told, split, where=f"tasks.{task}")]
    return readme | {name: listing.files[name] for name in dict.fromkeys(found)}


def _asked_by(task: str, table: TaskTable, where: str) -> AskedBy:
    return AskedBy(f"tasks.{task}.dataset = {table.dataset!r}", f"mrl fetch {where}")


def _earlier_commit(earlier: RunConfig | None, task: str, table: TaskTable) -> str:
    """Return the commit of a task's data set in `earlier`, if id and revision are the same; else ""."""
    had = earlier.tasks.get(task) if earlier is not None else None
    return had.commit if had is not None and (had.dataset, had.revision) == (table.dataset, table.revision) else ""


def shown_data(task: str, table: TaskTable) -> str:
    """Return id, commit and place of a task's data set of the hub, in words; "" for a task without one."""
    name = data_name(table)
    if name is None:
        return ""
    state = "fetched" if is_data_here(table) else "to be fetched"
    place = f" in {Path(snapshot(name))}" * bool(name.commit)
    return f"{task}: {name} ({state}){place}"
