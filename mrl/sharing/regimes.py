"""The regimes by name: checks of the `[sharing]` table of a run, and building of the regime that it names.

[sharing]
regime = "sgt"          name of the regime that runs
[sharing.sgt]           parameters of that regime; tables of other regimes may stand beside it
lambda = 0.3
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mrl.config.nearest_key import nearest
from mrl.config.policy_tables import PolicyTable
from mrl.config.replay_table import REPLAY, ReplayTable
from mrl.config.schema import RunConfig
from mrl.config.table import Table, known_or_plugin
from mrl.config.task_tables import COLLECTIVE, TaskTable
from mrl.config.validation_errors import wanted_by
from mrl.errors import ConfigError, PluginError, UserError
from mrl.plugins import REGIME, find_plugin, is_entry_point, load_plugin, raised_at, short_name
from mrl.records.experience import RecordKind
from mrl.sharing.collective import CollectiveParameters, CollectiveRegime
from mrl.sharing.context import SharingContext
from mrl.sharing.copd import CopdParameters, CopdRegime
from mrl.sharing.graft import GraftParameters, GraftRegime
from mrl.sharing.hacpo import HacpoParameters, HacpoRegime
from mrl.sharing.independent import IndependentParameters, IndependentRegime
from mrl.sharing.own_objective import clips_tokens, own_objective
from mrl.sharing.prefix import PrefixParameters, PrefixRegime
from mrl.sharing.prp import PrpParameters, PrpRegime
from mrl.sharing.regime import Regime, lacks_of_regime
from mrl.sharing.rlad import RladParameters, RladRegime
from mrl.sharing.sgt import SgtParameters, SgtRegime
from mrl.sharing.xgrpo import XgrpoParameters, XgrpoRegime


class RegimeKind(NamedTuple):
    """One regime: its typed table, the function that builds it, and what a configuration is checked by."""

    parameters: type[Table]
    build: Callable[[Any, SharingContext], Regime]
    carries_text: bool = True
    """Whether policies read each other's texts in own tokens, so that tokenizers are aligned. Turns of episodes
    that are written anew do not count."""
    learns_of_uniform_groups: bool = False
    """Whether the regime uses own groups whose answers all have one reward. Dynamic sampling drops these groups."""
    carries_episodes: bool = False
    """Whether the regime shares answers of several turns."""
    takes_voted_rewards: bool = False
    """Whether nothing that workers publish depends on rewards, so that rewards may come late: by the collective's
    vote."""
    replays: tuple[RecordKind, ...] = ()
    """Kinds of records that the regime can read of a run that ended (`sharing.replay`); empty where it can read
    none."""
    goes_on_in_episodes: bool = False
    """Whether own episodes go on from states that peers had reached: then all tasks need several turns, and
    environments that say the same again."""
    teachers_of: Callable[[Any, str, Sequence[str]], tuple[str, ...]] = lambda parameters, policy, policies: ()
    """(Parameters of the regime, a policy, all policies) -> the policies that score texts of that policy. A teacher's
    score enters a clip of token ratios, so the objective of a policy with a teacher needs such a clip."""
    reuses: bool = False
    """Whether the rows of an own group follow from the group alone, so that it may be absorbed again in later steps
    (`learner.reuse_share`)."""


REGIMES: dict[str, RegimeKind] = {
    "independent": RegimeKind(
        IndependentParameters,
        IndependentRegime,
        carries_text=False,
        carries_episodes=True,
        takes_voted_rewards=True,
        reuses=True,
    ),
    "prp": RegimeKind(
        PrpParameters, PrpRegime, learns_of_uniform_groups=True, carries_episodes=True, replays=("rollout",)
    ),
    "xgrpo": RegimeKind(
        XgrpoParameters,
        XgrpoRegime,
        carries_text=False,
        learns_of_uniform_groups=True,
        carries_episodes=True,
        takes_voted_rewards=True,
        replays=("value",),
    ),
    "sgt": RegimeKind(SgtParameters, SgtRegime, carries_episodes=True, replays=("outcome", "episode"), reuses=True),
    "prefix": RegimeKind(
        PrefixParameters, PrefixRegime, carries_text=False, carries_episodes=True, goes_on_in_episodes=True
    ),
    "hacpo": RegimeKind(
        HacpoParameters, HacpoRegime, learns_of_uniform_groups=True, carries_episodes=True, replays=("rollout",)
    ),
    "graft": RegimeKind(
        GraftParameters, GraftRegime, learns_of_uniform_groups=True, carries_episodes=True, replays=("rollout",)
    ),
    "rlad": RegimeKind(RladParameters, RladRegime, carries_episodes=True, teachers_of=RladParameters.teachers_of),
    "copd": RegimeKind(
        CopdParameters,
        CopdRegime,
        learns_of_uniform_groups=True,
        carries_episodes=True,
        teachers_of=CopdParameters.teachers_of,
    ),
}
"""Name -> every regime of mrl; a new one is added here and nowhere else. Regimes of other packages are plug-ins."""


def regime_kind(table: Mapping[str, Any], where: str = "") -> RegimeKind:
    """Return the regime that the `[sharing]` table in `where` names: one of `REGIMES`, else a plug-in, a `RegimeKind`
    too.

    Raises PluginError for a name that means neither.
    """
    name = _name(table)
    if name in REGIMES:
        return REGIMES[name]
    place = f"{where}: sharing.regime" if where else "sharing.regime"
    plugin = find_plugin(REGIME, name, REGIMES, where=place)
    kind: RegimeKind = load_plugin(plugin, _fault_of, where=place)
    return kind


def build_regime(table: Mapping[str, Any], context: SharingContext) -> Regime:
    """Build the regime of one policy. Raises ConfigError as `check_sharing` does, PluginError for a plug-in that is no
    regime.
    """
    kind, parameters = regime_kind(table), check_sharing(table, "")
    regime = (kind.build if _name(table) in REGIMES else partial(_of_plugin, kind))(parameters, context)
    if not context.voted:
        return regime
    return CollectiveRegime(regime, CollectiveParameters.model_validate(table.get(COLLECTIVE, {})), context)


def shares(table: Mapping[str, Any]) -> bool:
    """Whether policies share anything under this `[sharing]` table."""
    return _name(table) != "independent"


def aligns(table: Mapping[str, Any]) -> bool:
    """Whether tokenizers are aligned under this `[sharing]` table."""
    return regime_kind(table).carries_text


def replayed_kinds(table: Mapping[str, Any]) -> tuple[RecordKind, ...]:
    """Return the kinds of records that are read of a run that ended, under this `[sharing]` table; empty where none
    are.
    """
    return regime_kind(table).replays if REPLAY in table else ()


def scorers(table: Mapping[str, Any], policies: Mapping[str, PolicyTable]) -> frozenset[str]:
    """Return the policies whose engines score texts of learning policies, under this `[sharing]` table."""
    learning = [name for name, policy in policies.items() if not policy.frozen]
    return frozenset(teacher for name in learning for teacher in _teachers_of(table, name, policies))


def check_sharing(table: Mapping[str, Any], where: str) -> Table:
    """Return the typed parameters of the regime that the `[sharing]` table in `where` names. Every sub-table is
    checked.

    Sub-tables of plug-ins that do not run are allowed and not looked at: nothing is imported for them. Raises
    ConfigError for an unknown regime, an unknown key (with the nearest valid one) or a value out of bounds.
    """
    name = short_name(_name(table))
    kinds = REGIMES | {name: regime_kind(table, where)}
    for key, value in table.items():
        is_other_plugin = isinstance(value, Mapping) and is_entry_point(REGIME, key)
        if key not in ("regime", REPLAY, COLLECTIVE) and key not in kinds and not is_other_plugin:
            raise _unknown(
                f"sharing.{key}: unknown key", key, ["regime", *kinds, REPLAY, COLLECTIVE], where, prefix="sharing."
            )
    if REPLAY in table:
        _check(REPLAY, ReplayTable, table[REPLAY], where)
    _check(COLLECTIVE, CollectiveParameters, table.get(COLLECTIVE, {}), where)
    checked = {
        key: _check(key, kinds[key].parameters, table.get(key, {}), where) for key in {*table, name} if key in kinds
    }
    return checked[name]


def check_objectives(table: Mapping[str, Any], policies: Mapping[str, PolicyTable], where: str) -> None:
    """Check that every policy learns by an objective that suits the regime of the `[sharing]` table in `where`.

    Raises ConfigError where dynamic sampling drops groups of which the regime learns, and where a policy with a teacher
    has an objective without a clip of token ratios.
    """
    name = _name(table)
    check_sharing(table, where)
    for policy, of_policy in policies.items():
        objective = own_objective(of_policy.objective, max_answer_tokens=of_policy.rollout.max_new_tokens)
        if of_policy.frozen:
            continue
        if objective.drop_uniform_groups and regime_kind(table, where).learns_of_uniform_groups:
            raise ConfigError(
                f"policies.{policy}.objective.drop_uniform_groups: {name} learns from the groups that this drops",
                where=where,
                got=True,
                cure=f"set policies.{policy}.objective.drop_uniform_groups = false",
            )
        if _teachers_of(table, policy, policies) and not clips_tokens(objective.term):
            raise ConfigError(
                f"policies.{policy}.objective.method: with a teacher, token ratios must be clipped",
                where=where,
                got=of_policy.objective.method,
                wanted="grpo, dr_grpo or dapo",
            )


def check_episodes(table: Mapping[str, Any], tasks: Mapping[str, TaskTable], where: str) -> None:
    """Raises ConfigError where a task has an environment and the regime shares no episodes, or where the regime goes on
    in episodes and a task has none that it can go on in.
    """
    name = _name(table)
    if regime_kind(table, where).goes_on_in_episodes:
        _check_turns(name, tasks, where)
    played = [task for task, of_task in tasks.items() if of_task.is_played]
    if played and not regime_kind(table, where).carries_episodes:
        known = ", ".join(regime for regime, kind in REGIMES.items() if kind.carries_episodes)
        raise ConfigError(
            f"sharing.regime: {name} does not support tasks with an environment or agents",
            where=where,
            got=f"tasks.{played[0]}.source = {tasks[played[0]].source}",
            wanted=f"one of {known}",
            cure="use another regime, or a task of prompts and answers",
        )


def check_votes(config: RunConfig, where: str) -> None:
    """Raises ConfigError where answers are voted on and a setting needs their rewards before the vote."""
    voted = next((name for name, task in config.tasks.items() if task.is_voted), None)
    if voted is None:
        return
    other = f"set tasks.{voted}.verifier to another verifier than {COLLECTIVE}"
    for key, got, wanted, cure in _needing_rewards(config, where):
        what = f"{key}: the answers of tasks.{voted} have no rewards until the vote"
        raise ConfigError(what, where=where, got=got, wanted=wanted, cure=f"{cure}, or {other}")


def _needing_rewards(config: RunConfig, where: str) -> Iterator[tuple[str, object, str, str]]:
    """Yield (key, got, wanted, cure) of every setting that needs the rewards of answers before a vote."""
    name, pool, xgrpo = _name(config.sharing), config.pool, config.sharing.get("xgrpo", {})
    if not regime_kind(config.sharing, where).takes_voted_rewards:
        known = ", ".join(regime for regime, kind in REGIMES.items() if kind.takes_voted_rewards)
        yield "sharing.regime", name, f"one of {known}", "use one of these regimes"
    if replayed_kinds(config.sharing):
        yield f"sharing.{REPLAY}", "a table", "no table: old runs have no votes", f"remove [sharing.{REPLAY}]"
    for key in ("keep_solved", "keep_hopeless"):
        if getattr(pool, key) < 1:
            yield f"pool.{key}", getattr(pool, key), "1", f"set --pool.{key} 1"
    for key in ("peer_hold_versions", "peer_wait_s") if name == "xgrpo" else ():
        if key in xgrpo:
            voted = f"sharing.{COLLECTIVE}.{key}"
            yield f"sharing.xgrpo.{key}", xgrpo[key], f"{voted} in its place", f"set {voted} instead"
    for policy in config.learning:
        if _drops_uniform(config, policy):
            key = f"policies.{policy}.objective.drop_uniform_groups"
            yield key, True, "false", f"set {key} = false"


def check_reuse(config: RunConfig, where: str) -> None:
    """Raises ConfigError where a policy trains again on own groups whose credit, or rewards, peers give only once."""
    policy = next((name for name in config.learning if config.policies[name].learner.reused_groups), None)
    if policy is None:
        return
    key = f"policies.{policy}.learner.reuse_share"
    voted = next((name for name, task in config.tasks.items() if task.is_voted), None)
    if voted is not None:
        raise ConfigError(
            f"{key}: peers vote only once on the answers of tasks.{voted}, so own groups cannot be trained on again",
            where=where,
            got=config.policies[policy].learner.reuse_share,
            wanted="0",
            cure=f"remove the key, or set tasks.{voted}.verifier to another verifier than {COLLECTIVE}",
        )
    if not regime_kind(config.sharing, where).reuses:
        known = ", ".join(name for name, kind in REGIMES.items() if kind.reuses)
        raise ConfigError(
            f"{key}: {_name(config.sharing)} uses peer records only once, so own groups cannot be trained on again",
            where=where,
            got=config.policies[policy].learner.reuse_share,
            wanted=f"0, or sharing.regime one of {known}",
        )


def goes_on_in_episodes(table: Mapping[str, Any]) -> bool:
    """Whether own episodes go on from states that peers had reached, under this `[sharing]` table."""
    return regime_kind(table).goes_on_in_episodes


def sharing_schema() -> dict[str, Any]:
    """Return the JSON schema of the `[sharing]` table: the regime's name and one sub-table per regime; any for a
    plug-in's.
    """
    tables = {name: kind.parameters.model_json_schema(by_alias=True) for name, kind in REGIMES.items()}
    regime = known_or_plugin(list(REGIMES)) | {
        "default": "independent",
        "description": "Name of the regime that runs; or a plug-in's.",
    }
    tables[REPLAY] = ReplayTable.model_json_schema()
    tables[COLLECTIVE] = CollectiveParameters.model_json_schema()
    others = {"type": "object", "description": "Parameters of a regime that is a plug-in."}
    return {"type": "object", "properties": {"regime": regime, **tables}, "additionalProperties": others}


def _check_turns(name: str, tasks: Mapping[str, TaskTable], where: str) -> None:
    """Raises ConfigError for a task whose answers have one turn, after which nobody can go on, and for a task of
    agents, whose turns cannot be played again.
    """
    for task, of_task in tasks.items():
        if of_task.source == "agent":
            raise ConfigError(
                f"sharing.regime: {name} replays a peer's turns, and the agents of {task} cannot be replayed",
                where=where,
                got=f"tasks.{task}.source = agent",
                wanted="tasks that have an environment, and max_turns >= 2",
                cure="use --sharing.regime sgt, or run this task in a run of its own",
            )
        if of_task.source != "environment" or of_task.max_turns < 2:
            key = "max_turns" if of_task.source == "environment" else "source"
            raise ConfigError(
                f"sharing.regime: {name} continues after a peer's first turns, but answers of {task} have one turn",
                where=where,
                got=f"tasks.{task}.{key} = {getattr(of_task, key)}",
                wanted="tasks that have an environment, and max_turns >= 2",
                cure="use --sharing.regime sgt, or run this task in a run of its own",
            )


def _fault_of(found: object) -> str:
    """Return what a plug-in has to be, where it is no regime; "" where it is one."""
    if not (isinstance(found, RegimeKind) and issubclass(found.parameters, Table) and callable(found.build)):
        return "a mrl.sharing.regimes.RegimeKind(parameters, build), with a mrl.config.table.Table as parameters"
    lacks = lacks_of_regime(found.build) if isinstance(found.build, type) else ""
    return f"{lacks} in {found.build.__name__}" if lacks else ""


def _of_plugin(kind: RegimeKind, parameters: Table, context: SharingContext) -> Regime:
    """Build the regime of a plug-in. Errors of its constructor other than UserError are told as the plug-in's fault."""
    where, name = "sharing.regime", getattr(kind.build, "__name__", kind.build)
    try:
        regime = kind.build(parameters, context)
        lacks = lacks_of_regime(regime)
    except UserError:
        raise
    except Exception as error:
        what, place = f"{name} cannot be created ({type(error).__name__}: {error})", raised_at(error)
        wanted = "" if place else "a callable with the arguments (parameters, context)"
        raise PluginError(what, where=where, wanted=wanted, cure=f"check {place}" if place else "") from error
    if lacks:
        what, wanted = f"{name} does not return a regime", f"an object with {lacks}"
        raise PluginError(what, where=where, got=type(regime).__name__, wanted=wanted)
    return regime


def _check(name: str, kind: type[Table], parameters: object, where: str) -> Table:
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"sharing.{name}: not a table", where=where, got=parameters, wanted=f"[sharing.{name}]")
    try:
        return kind.model_validate(dict(parameters))
    except ValidationError as error:
        mistakes = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        raise _explain(mistakes[0], name, kind, where) from error


def _drops_uniform(config: RunConfig, policy: str) -> bool:
    table = config.policies[policy]
    return own_objective(table.objective, max_answer_tokens=table.rollout.max_new_tokens).drop_uniform_groups


def _teachers_of(table: Mapping[str, Any], policy: str, policies: Mapping[str, PolicyTable]) -> tuple[str, ...]:
    return regime_kind(table).teachers_of(check_sharing(table, ""), policy, list(policies))


def _name(table: Mapping[str, Any]) -> str:
    return str(table.get("regime", "independent"))


def _explain(mistake: ErrorDetails, name: str, kind: type[Table], where: str) -> ConfigError:
    if not mistake["loc"]:  # each key is valid alone, and they contradict each other
        return ConfigError(f"sharing.{name}: {mistake['msg'].removeprefix('Value error, ')}", where=where)
    key = str(mistake["loc"][0])
    if mistake["type"] != "extra_forbidden":
        what = f"sharing.{name}.{key}: invalid value"
        return ConfigError(what, where=where, got=mistake["input"], wanted=wanted_by(mistake))
    keys = [field.alias or own for own, field in kind.model_fields.items()]
    return _unknown(f"sharing.{name}.{key}: unknown key", key, keys, where, prefix=f"sharing.{name}.")


def _unknown(what: str, got: str, known: Iterable[str], where: str, *, prefix: str) -> ConfigError:
    known = list(known)
    near = nearest(got, known)
    cure = f"did you mean {prefix}{near}?" if near else ""
    wanted = ("one of " + ", ".join(known)) if known else "an empty table"
    return ConfigError(what, where=where, got=got, wanted=wanted, cure=cure)
