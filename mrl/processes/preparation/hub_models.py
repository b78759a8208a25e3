"""The models of a configuration that come from the hub: pinned to commits, fetched, found on this machine.

A policy's `model` is a folder if one exists. Else its `source`, or `model` itself, is an id on the hub with
`model_revision`. In a pinned configuration `model` is the folder of the hub's cache that holds the commit, `source` is
ID@COMMIT, and `model_revision` is the revision asked for; `config.json` keeps these, for resumption and other hosts.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from mrl.config.nearest_key import nearest
from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, MissingError
from mrl.hub_names import AskedBy, HubName, not_here, parse_name, snapshot
from mrl.processes.preparation.hub import commit_of, fetch, is_whole, known_commit
from mrl.processes.preparation.hub_data import fetched_data, pinned_data, unfetched_data
from mrl.processes.preparation.prompt_days import dated
from mrl.tasks.jsonl_rows import relative_to


def named(policy: PolicyTable) -> HubName | None:
    """Return the model of the hub that a policy takes; None for a made policy, and for a folder of this machine."""
    if policy.make is not None or not policy.model:
        return None
    source = parse_name(policy.source)
    if source is not None and source.commit and Path(policy.model) == snapshot(source):
        return source
    folder = Path(policy.model)
    if folder.exists():
        return None
    if not policy.source and folder.parent != Path() and folder.parent.is_dir():
        return None  # a misspelt name below a folder of this machine, not an id
    return parse_name(policy.source or policy.model, policy.model_revision)


def pinned(
    config: RunConfig, *, where: str, earlier: RunConfig | None = None, on_note: Callable[[str], None]
) -> RunConfig:
    """Return `config` with the commit of every model of the hub, as far as known; nothing is fetched or written.

    A policy that `earlier` had by the same id and revision keeps its commit, and every policy of `earlier` keeps its
    day (`prompt.today`). The hub is asked for other commits. Where it cannot be reached, the commit is that of the last
    fetch, and `on_note` is told. Data sets of the hub are pinned, too. Raises UserError for a model that the hub does
    not have or does not give, and for a revision without effect.
    """
    policies, is_reached = dict(config.policies), True
    for name, policy in config.policies.items():
        model = named(policy)
        _check_revision(name, policy, model)
        if model is None:
            continue
        commit = model.commit or _earlier_commit(earlier, name, model)
        if not commit and is_reached:
            try:
                commit = commit_of(model, asked_by(name, policy, where))
            except MissingError as error:
                is_reached = False
                on_note(f"{error.where}: the hub is not available ({error.got}); using what was fetched last, if any")
        commit = commit or known_commit(model)
        if commit:
            policies[name] = _at(policy, model, commit)
    config = config.model_copy(update={"policies": policies})
    return dated(pinned_data(config, where=where, earlier=earlier, on_note=on_note), earlier)


def fetched(config: RunConfig, names: Collection[str], *, where: str, tell: Callable[[str], None]) -> RunConfig:
    """Fetch the hub models of the policies `names`, and all data sets of the hub; return `config`, pinned.

    Where the hub cannot be asked, a model that seems whole stays as it is, and `tell` gets a line. Raises UserError for
    the first that cannot be fetched.
    """
    policies = dict(config.policies)
    for name in [name for name in config.policies if name in names]:
        policy = config.policies[name]
        model = named(policy)
        if model is None:
            continue
        revision = policy.model_revision or ("" if model.commit else model.revision)
        try:
            folder = fetch(model, asked_by(name, policy, where), revision=revision, tell=tell)
        except MissingError as error:
            if _is_missing(policy):
                raise
            tell(f"{error.where}: the hub is not available ({error.got}); using {model}, which was fetched before")
        else:
            policies[name] = _at(policy, model, folder.name)
    return dated(fetched_data(config.model_copy(update={"policies": policies}), where=where, tell=tell))


def unfetched(config: RunConfig) -> list[str]:
    """Return the policies and tasks whose model or data set of the hub is not whole on this machine."""
    return [name for name, policy in config.policies.items() if _is_missing(policy)] + unfetched_data(config)


def missing_model(name: str, policy: PolicyTable, where: str) -> MissingError | None:
    """Return an error with the cure for a policy's model that is not here; None where it is here, or made."""
    model = named(policy)
    if model is None:
        return _missing_folder(name, policy)
    if not _is_missing(policy):
        return None
    key = asked_by(name, policy, where).key
    what = f"the model {model} is missing" if policy.source else not_here(model)
    return MissingError(what, where=key, cure=f"mrl fetch {where}")


def _missing_folder(name: str, policy: PolicyTable) -> MissingError | None:
    folder = Path(policy.model)
    if not policy.model or folder.exists():
        return None
    near = nearest(folder.name, [one.name for one in folder.parent.glob("*/")])
    return MissingError(
        "no such folder" + relative_to(folder),
        where=f"policies.{name}.model = {policy.model!r}",
        wanted="a Hugging Face model folder, or an id such as Qwen/Qwen3-0.6B",
        cure=f"did you mean {folder.parent / near}?"
        if near
        else f'set policies.{name}.source = "ORG/NAME" to fetch the model from the hub, '
        f"or give the policy a [policies.{name}.make] table instead",
    )


def located(config: RunConfig) -> RunConfig:
    """Return a run's configuration with the folders of its pinned models in this host's cache."""
    policies = dict(config.policies)
    for name, policy in config.policies.items():
        model = parse_name(policy.source)
        if model is not None and model.commit == Path(policy.model).name and not Path(policy.model).exists():
            policies[name] = policy.model_copy(update={"model": str(snapshot(model))})
    return config.model_copy(update={"policies": policies})


def check_here(config: RunConfig, names: Collection[str], run: Path) -> None:
    """Raises MissingError for the first policy of `names` whose model of the hub is not on this host."""
    for name in names:
        policy = config.policies[name]
        if named(policy) is not None and (missing := missing_model(name, policy, str(run))):
            raise MissingError(missing.what, where=missing.where, cure=f"{missing.cure} on this host")


def asked_by(name: str, policy: PolicyTable, where: str) -> AskedBy:
    """Return the key that names a policy's model, as messages show it, and the command that fetches the model."""
    model = named(policy)
    is_pinned = model is not None and bool(model.commit) and Path(policy.model) == snapshot(model)
    shown = model.id if model is not None and is_pinned else policy.model
    return AskedBy(f"policies.{name}.model = {shown!r}", f"mrl fetch {where}")


def _is_missing(policy: PolicyTable) -> bool:
    model = named(policy)
    return model is not None and not (model.commit and is_whole(snapshot(model)))


def _at(policy: PolicyTable, model: HubName, commit: str) -> PolicyTable:
    folder = snapshot(model.at(commit))
    if Path(policy.model) == folder:
        return policy
    found = {"model": str(folder), "source": str(model.at(commit)), "model_revision": model.revision}
    return policy.model_copy(update=found)


def _earlier_commit(earlier: RunConfig | None, name: str, model: HubName) -> str:
    """Return the commit of a policy's model in `earlier`, if id and revision are the same; else ""."""
    policy = earlier.policies.get(name) if earlier is not None else None
    had = parse_name(policy.source) if policy is not None else None
    if policy is None or had is None or had.id != model.id or policy.model_revision != model.revision:
        return ""
    return had.commit


def _check_revision(name: str, policy: PolicyTable, model: HubName | None) -> None:
    """Raises ConfigError for a revision of a folder, and for one that differs from the revision beside the id."""
    source = parse_name(policy.source)
    is_pinned = source is not None and bool(source.commit) and source.commit == Path(policy.model).name
    if not policy.model_revision or is_pinned:
        return
    key = f"policies.{name}.model_revision"
    if model is None:
        is_there = policy.make is None and Path(policy.model).exists()
        raise ConfigError(
            f"{key}: only a model from the hub has a revision",
            got=f"{policy.model_revision!r}, and model = {policy.model!r}" + ", an existing folder" * is_there,
            wanted="the hub id of a model, or no revision",
        )
    if model.revision != policy.model_revision:
        raise ConfigError(
            f"{key}: not the revision that stands after the model id",
            got=f"{policy.model_revision!r}, and {str(model)!r}",
            wanted="the revision in only one of the two places",
        )
