"""Check the ended run whose records a run begins with: it must be readable, and have prompts of this run."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mrl.config.nearest_key import nearest
from mrl.config.replay_table import REPLAY, ReplayTable, is_replayed, replay_of
from mrl.config.run_folder import RunFolder, dump_config, run_folder_of, supervisor_of
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, RunFolderError
from mrl.exchange.replay import Shared, shared_in
from mrl.sharing.regimes import replayed_kinds

FEW_SHARE = 0.05
"""Share of this run's prompts with records below which the user is told."""


def check_replay(config: RunConfig, prompt_ids: Collection[str], on_note: Callable[[str], None], *, where: str) -> None:
    """Check the run that `sharing.replay` names, and compare its prompts with `prompt_ids`, those of this run, if any.

    `on_note` is told when few of this run's prompts have a record, and of tasks that the two runs define differently.
    Raises ConfigError or RunFolderError for a run that cannot be replayed, ConfigError where the two have no prompt in
    common.
    """
    table, kinds = replay_of(config.sharing), replayed_kinds(config.sharing)
    if table is None or not kinds:
        return
    folder = RunFolder(Path(table.run).absolute())
    tasks, regime = _ended_run(config, folder, where=where)
    shared = shared_in(folder.exchange)
    chosen = _of_policies(shared, table, where=where)
    known = {prompt_id for one in chosen if one.kind in kinds for prompt_id in one.prompt_ids}
    if not known:
        raise ConfigError(
            f"sharing.replay.run: that run has no records that the regime {config.sharing['regime']} reads",
            where=where,
            got=", ".join(sorted({one.kind for one in chosen})) or "no record",
            wanted=f"records of kind {' or '.join(kinds)}",
            cure=f"set --sharing.regime {regime}, as in that run",
        )
    if not prompt_ids:
        return
    common = known & set(prompt_ids)
    if not common:
        raise ConfigError(
            "sharing.replay.run: no prompt of that run is in the pool of this run",
            where=where,
            got=table.run,
            wanted="a run with the same [tasks] and [pool]: prompts are matched by the hash of their text",
        )
    if len(common) < FEW_SHARE * len(prompt_ids):
        on_note(
            f"sharing.replay.run: that run has records of only {len(common)} of {len(prompt_ids)} prompts,"
            " so it will rarely help; its [tasks] or [pool] differ"
        )
    for task, table in dump_config(config)["tasks"].items():
        before = tasks.get(task, {})
        if any(before[key] != table[key] for key in before.keys() & table.keys()):
            on_note(f"sharing.replay.run: [tasks.{task}] differs in that run; its rewards are used unchanged")


def with_replay(config: RunConfig) -> RunConfig:
    """Return `config` with folder and policies of `sharing.replay` filled in, or without it if no regime reads it."""
    table = replay_of(config.sharing)
    if table is None:
        return config
    others = {key: value for key, value in config.sharing.items() if key != REPLAY}
    if not replayed_kinds(config.sharing):
        return config.model_copy(update={"sharing": others})
    folder = Path(table.run).absolute()
    policies = table.policies or _policies_in(shared_in(RunFolder(folder).exchange))
    filled = table.model_copy(update={"run": str(folder), "policies": policies})
    return config.model_copy(update={"sharing": others | {REPLAY: filled.model_dump(mode="json", exclude_none=True)}})


def _ended_run(config: RunConfig, folder: RunFolder, *, where: str) -> tuple[dict[str, Any], str]:
    """Return tasks and regime of the run to be replayed. Raises ConfigError unless it is another run, and over.

    Its configuration is read as plain values: it may be of another version of mrl, or name modules that this run lacks.
    """
    is_own = folder.path.resolve() == run_folder_of(config).path
    if is_own or supervisor_of(folder.path) is not None:
        raise ConfigError(
            f"sharing.replay.run: {'this is the run itself' if is_own else 'that run is still running'}",
            where=where,
            got=str(folder.path),
            wanted="the folder of another run that has ended",
        )
    try:
        told = json.loads(folder.config_json.read_text(encoding="utf-8"))
        return {task: dict(table) for task, table in told["tasks"].items()}, str(told["sharing"]["regime"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise RunFolderError(
            "sharing.replay.run: not a run folder (no readable config.json)",
            where=str(folder.path),
            cure="give the folder of a run, runs/<name>",
        ) from None


def _policies_in(shared: Collection[Shared]) -> list[str]:
    """Return all policies that shared anything, without those that the run itself replayed from another run."""
    return sorted({one.source for one in shared if not is_replayed(one.source)})


def _of_policies(shared: Collection[Shared], table: ReplayTable, *, where: str) -> list[Shared]:
    """Return what the policies of `table`, or else all, shared. Raises ConfigError for one that shared nothing."""
    names = table.policies or _policies_in(shared)
    there = sorted({one.source for one in shared})
    for name in names:
        if name not in there:
            near = nearest(name, there)
            raise ConfigError(
                "sharing.replay.policies: this policy has no records in that run",
                where=where,
                got=name,
                wanted="one or more of " + ", ".join(there),
                cure=f"did you mean {near!r}?" if near else "",
            )
    return [one for one in shared if one.source in names]
