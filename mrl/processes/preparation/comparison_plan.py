"""The runs of a comparison: their configurations, and how far they came in an earlier call."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from mrl.config.load import load_config
from mrl.config.overrides import WHERE, leaves, parse_overrides
from mrl.config.policy_tables import PolicyTable
from mrl.config.resume import first_difference
from mrl.config.run_folder import RunFolder, is_run, read_run_config
from mrl.config.schema import NO_EVALUATION, RunConfig
from mrl.errors import ConfigError, RunFolderError
from mrl.plugins import short_name

FITTED = {"learner": ("microbatch_tokens", "activation_checkpointing"), "rollout": ("answers_at_once",)}
"""Table of a policy -> keys that, where left out, follow from the memory of the host."""
REPLACED = {
    "--run.seed": "use --seeds",
    "--run.folder": "use --folder",
    "--run.sync": "leave it out, or use --async",
    "--sharing.regime": "use --regimes",
}
"""Override that every run of a comparison would replace -> the option to use instead."""
SEEDS, TUNED_SEEDS = "3", "8"
"""Defaults of `--seeds`, without and with tuning."""
REPORTED = {"sgt-reported": ("sgt", ("--sharing.sgt.lambda", "0.1", "--sharing.sgt.normaliser", "prompts"))}
"""Name of a row -> a regime with the settings that papers report for it, whatever the configuration says. Shipped
configurations tune SGT. The lambda here is reported by GRAFT, and the normaliser is the one in which rescues fade."""


class Planned(NamedTuple):
    """Settings that the runs of one row have in common."""

    row: str
    """Name of a regime, or one of `REPORTED`."""
    label: str
    """Beginning of the names of its run folders, LABEL-SEED."""
    words: tuple[str, ...] = ()
    """Overrides that follow those of the command line."""


@dataclass(frozen=True)
class PlannedRun:
    """One training run of the comparison."""

    regime: str
    """Row of the run: the name of a regime, or one of `REPORTED`."""
    seed: int
    folder: Path
    config: RunConfig
    left_out: tuple[str, ...] = ()
    """Frozen policies of the comparison that this regime does not use."""

    @property
    def config_toml(self) -> Path:
        """File of the configuration, for `mrl train`."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def output(self) -> Path:
        """File of the output of `mrl train`, of its last call."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def state(self) -> "State":
        """Return how far the run in `folder` has come."""
        try:
            earlier = read_run_config(self.folder, is_own=False)
        except RunFolderError:
            return State()
        if (difference := _difference(earlier, self.config)) is not None:
            return State(difference=difference)
        last = [self.folder / "evaluation" / f"{name}-{self.config.run.steps}.json" for name in self.config.learning]
        checkpoints = [self.folder / "checkpoints" / name for name in self.config.learning]
        return State(
            is_done=all(path.exists() for path in last),
            can_resume=all(any(path.glob("step_*")) for path in checkpoints),
        )


@dataclass(frozen=True, slots=True)
class State:
    """How far a run has come; all fields are false before it began."""

    is_done: bool = False
    """Whether this very configuration ran to its end."""
    can_resume: bool = False
    """Whether the run was begun and every learning policy has a checkpoint."""
    difference: tuple[str, Any, Any] | None = None
    """First key that differs where the folder holds a run of another configuration, its value there and here."""


def plan_runs(arguments: argparse.Namespace, chosen: Mapping[str, tuple[str, ...]] | None = None) -> list[PlannedRun]:
    """Return all runs, each row with the overrides `chosen` for it. Raises ConfigError for mistaken arguments."""
    planned = [Planned(row, short_name(row), (chosen or {}).get(row, ())) for row in rows_of(arguments)]
    return plan_rows(arguments, folder_of(arguments), planned, final_seeds(arguments))


def plan_rows(
    arguments: argparse.Namespace, folder: Path, planned: Sequence[Planned], seeds: Sequence[int]
) -> list[PlannedRun]:
    """Return runs seed by seed, so that every row has results early; with `--tune` each seed makes its own policies."""
    names = [f"{one.label}-{seed}" for one in planned for seed in seeds]
    earlier, runs = _earlier([folder / name for name in names], folder_of(arguments)), list[PlannedRun]()
    makes: dict[str, int] = {}
    if arguments.tune is not None:
        tables = base_config(arguments).policies
        makes = {name: table.make.seed for name, table in tables.items() if table.make is not None}
    for seed in seeds:
        made = [word for name, first in makes.items() for word in (f"--policies.{name}.make.seed", str(first + seed))]
        for one in planned:
            begun = _with_policies_of(runs[0].config, earlier) if runs else earlier
            runs.append(_plan_one(arguments, folder, one._replace(words=(*one.words, *made)), seed, begun))
    return runs


def rows_of(arguments: argparse.Namespace) -> list[str]:
    """Return the rows asked for, each once; the first is the baseline. Raises ConfigError for an empty name."""
    rows = list(dict.fromkeys(row.strip() for row in arguments.regimes.split(",")))
    if "" in rows:
        wanted = "regimes, separated by commas, such as independent,sgt"
        raise ConfigError("a regime has no name", where="--regimes", got=arguments.regimes, wanted=wanted)
    return rows


def final_seeds(arguments: argparse.Namespace) -> list[int]:
    """Return the seeds of the final runs, over which the tables are made."""
    usual = SEEDS if arguments.tune is None else TUNED_SEEDS
    return seeds_in(usual if arguments.seeds is None else arguments.seeds, where="--seeds")


def base_config(arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration under the first row, before any other change for a run."""
    return load_config(arguments.config, [*arguments.overrides, *settings_of(rows_of(arguments)[0])])


def given_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the keys that the command line overrides, as `--run.steps`; a whole table counts key by key."""
    pairs = parse_overrides(arguments.overrides)
    return [f"--{key}" for path, value in pairs for key in leaves({".".join(path): value})]


def check_given(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for an override that every run would replace."""
    for key in given_keys(arguments):
        if key in REPLACED:
            raise ConfigError(
                "the comparison sets this option itself in every run", where=WHERE, got=key, cure=REPLACED[key]
            )


def check_folder(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a folder that holds no runs and cannot, or that is itself a run."""
    folder = folder_of(arguments)
    where = "--folder" if arguments.folder else str(arguments.config)
    if is_run(folder):
        what, cure = "the folder of a run, not of a comparison", "name another folder"
    elif folder.exists() and not folder.is_dir():
        what, cure = "a file, not a folder", "name another folder"
    elif arguments.only_table and arguments.tune is None and not folder.exists():
        what, cure = "no such folder", "leave out --only-table to train the runs, or name the folder of a comparison"
    else:
        return
    raise ConfigError(what, where=where, got=str(folder), wanted="the folder of a comparison", cure=cure)


def folder_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the comparison's runs."""
    return arguments.folder or Path("runs") / f"compare-{base_config(arguments).run.name}"


def tuning_folder(whole: Path) -> Path:
    """Return the folder of the tuning runs of the comparison in `whole`."""
    return whole / "tuning"


def check_untuned(runs: Sequence[PlannedRun]) -> None:
    """Raises ConfigError where the comparison's folder holds final runs that no tuning preceded."""
    folder = runs[0].folder.parent
    if not tuning_folder(folder).is_dir() and any(RunFolder(one.folder).config_json.is_file() for one in runs):
        raise ConfigError(
            "the folder holds runs of a comparison without --tune", where=str(folder), cure="use another --folder"
        )


def check_earlier(runs: Sequence[PlannedRun]) -> None:
    """Raises ConfigError when a run would replace a run of another configuration, which may have cost hours."""
    for one in runs:
        if (difference := one.state().difference) is not None:
            key, has, wanted = difference
            raise ConfigError(
                f"the folder holds a run of another configuration, which has another {key}",
                where=str(one.folder),
                got=has,
                wanted=str(wanted),
                cure="use another --folder, or delete this one",
            )


def _earlier(named: Sequence[Path], whole: Path) -> RunConfig | None:
    """Return the configuration of a run of the comparison that was begun before; None where there is no such run.

    The folders `named` come first, then all runs in `whole`, those of its tuning included. Policies that the first run
    left out come from the first run that has them. Other runs have to keep the same commits of models and the same day
    in prompts.
    """
    begun = [path.parent for place in (whole, tuning_folder(whole)) for path in sorted(place.glob("*/config.json"))]
    found: RunConfig | None = None
    for path in dict.fromkeys((*named, *begun)):
        if RunFolder(path).config_json.is_file():
            with suppress(RunFolderError):  # a damaged run is begun anew, if it is one of this comparison
                run = read_run_config(path, is_own=False)
                found = run if found is None else _with_policies_of(found, run)
    return found


def _with_policies_of(config: RunConfig, other: RunConfig | None) -> RunConfig:
    policies = {} if other is None else other.policies
    return config.model_copy(update={"policies": dict(policies) | dict(config.policies)})


def _plan_one(
    arguments: argparse.Namespace, folder: Path, planned: Planned, seed: int, earlier: RunConfig | None
) -> PlannedRun:
    from mrl.processes.preparation.completion import complete
    from mrl.processes.preparation.hub_models import pinned
    from mrl.processes.preparation.preflight import unasked
    from mrl.processes.preparation.replayed_run import with_replay

    name = f"{planned.label}-{seed}"
    chosen = ["--run.folder", str(folder), "--run.name", name, "--run.seed", str(seed), *settings_of(planned.row)]
    chosen += ["--run.sync", "false" if arguments.is_async else "true", *planned.words]
    config = load_config(arguments.config, [*arguments.overrides, *chosen])
    config = pinned(config, where=str(arguments.config), earlier=earlier, on_note=lambda _: None)
    config = with_replay(complete(config).config)  # as the run itself does: it is compared with the run's own
    if config.evaluation.every == NO_EVALUATION:
        raise ConfigError(
            "evaluation.every: runs that evaluate nothing cannot be compared",
            where=str(arguments.config),
            got=NO_EVALUATION,
            wanted="0 (evaluate at the start and the end) or the number of steps between evaluations",
        )
    left_out = tuple(unasked(config, where=str(arguments.config)))
    policies = {policy: table for policy, table in config.policies.items() if policy not in left_out}
    return PlannedRun(planned.row, seed, folder / name, config.model_copy(update={"policies": policies}), left_out)


def config_toml(config: RunConfig) -> str:
    """The keys set in `config`, as TOML that `load_config` reads back to an equal configuration."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True, exclude_none=True))


def settings_of(row: str) -> list[str]:
    """Return the overrides that turn a configuration into that of this row."""
    regime, settings = REPORTED.get(row, (row, ()))
    return ["--sharing.regime", regime, *settings]


def seeds_in(text: str, *, where: str) -> list[int]:
    """Return the seeds in `text`: `3` is 1, 2 and 3; `11,12` and `11,` are lists. Raises ConfigError otherwise."""
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or numbers == [0]:
        raise ConfigError(
            "not a number of seeds",
            where=where,
            got=text,
            wanted="a number of seeds such as 3, or a list such as 11,12,13 (11, is a list of one)",
        )
    return list(dict.fromkeys(numbers)) if "," in text else list(range(1, numbers[0] + 1))


def _difference(earlier: RunConfig, wanted: RunConfig) -> tuple[str, Any, Any] | None:
    """Return the first key that differs and its two values, None where two configurations agree.

    Models and keys that are only filled in when a run starts count for nothing.
    """
    policies = {
        name: _before_its_start(table, wanted.policies[name]) if name in wanted.policies else table
        for name, table in earlier.policies.items()
    }
    begun = earlier.model_copy(update={"policies": policies})
    if begun == wanted:
        return None
    path, has, given = first_difference(begun.model_dump(), wanted.model_dump(), ()) or ((), "", "")
    return ".".join(path) or "order of keys", has, given


def _before_its_start(earlier: PolicyTable, wanted: PolicyTable) -> PolicyTable:
    update: dict[str, Any] = {"model": wanted.model}
    for name, keys in FITTED.items():
        table = getattr(wanted, name)
        left_out = {key: getattr(table, key) for key in keys if key not in table.model_fields_set}
        update[name] = getattr(earlier, name).model_copy(update=left_out)
    return earlier.model_copy(update=update)
