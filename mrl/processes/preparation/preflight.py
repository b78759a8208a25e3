"""Find every fault of a configuration that can be found before a process is started or a file is written."""

import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from mrl.config.nearest_key import nearest
from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import AddressError, ConfigError, EngineError, MissingError, PluginError, TaskError, in_place
from mrl.models.size import equal_parts
from mrl.processes.planning.placement import server_gpus
from mrl.processes.planning.unit_workers import check_cores, units_of
from mrl.processes.preparation.hub_data import unfetched_data
from mrl.processes.preparation.hub_models import missing_model, named
from mrl.processes.preparation.learning_values import check_learning
from mrl.processes.preparation.model_folder import check_below_adapters, check_model_folder, text_part
from mrl.processes.preparation.named_plugins import check_shadows, try_regime
from mrl.processes.preparation.prompt_fit import check_prompts
from mrl.processes.preparation.replayed_run import check_replay
from mrl.processes.preparation.tracker_checks import check_trackers
from mrl.processes.preparation.wait_notice import wait_notice

if TYPE_CHECKING:
    from mrl.tasks.environments.contract import EnvironmentTurn
    from mrl.tasks.pool import Prompt
    from mrl.tasks.verifier_trial import Trial


def unheard(_: object) -> None:
    """Do nothing with a note, or with the results of a verifier, which raises by itself where it fails."""


def preflight(
    config: RunConfig,
    *,
    where: str,
    first_host: str = "",
    on_missing: Callable[[MissingError], None] | None = None,
    on_unfetched: Callable[[MissingError], None] | None = None,
    on_trial: "Callable[[Sequence[Trial]], None]" = unheard,
    on_note: Callable[[str], None] = unheard,
    on_prompts: "Callable[[str, Sequence[Prompt]], None]" = lambda policy, prompts: None,
) -> tuple[int, int]:
    """Check sharing parameters, addresses, model folders and tasks. Raises UserError for the first fault.

    `on_missing` is told of every model, data file and package that is not there yet; without `on_missing`, one
    MissingError is raised at the end, with all of them. `on_unfetched`, if given, is told instead of models and data
    sets that `mrl fetch` gets. `on_trial` gets the results of each verifier of the user's own, `on_note` notes on
    behaviour that may surprise, and `on_prompts` each policy that can be asked already, with the prompts.
    `first_host`: the name of this host in a run on several hosts; other hosts check their own cores. Returns the number
    of prompts to train on, and the number of held-out prompts.
    """
    from mrl.allocation.floors import check_floors
    from mrl.processes.planning.local_folder import parent_of
    from mrl.sharing.regimes import check_objectives

    check_shadows(config, where=where)
    check_teacher(config, where=where)
    check_frozen(config, where=where)
    check_scorers(config, where=where)
    check_objectives(config.sharing, config.policies, where)
    check_learning(config, where=where)
    check_floors(config, where=where)
    _check_addresses(config, where=where)
    parent_of(config)
    not_there: list[MissingError] = []
    tell = on_missing or not_there.append
    check_trackers(config, tell, where=where)
    check_cores(units_of(config, first_host, is_first=True), where=where)
    _check_models(config, tell, on_unfetched or tell, where=where)
    check_adapters(config, tell)
    if not first_host:  # on several hosts engines start on other hosts, too
        check_engines(config, tell)
    try:
        prompts, num_held_out = check_tasks(config, tell, on_trial, on_unfetched=on_unfetched, on_note=on_note)
    except (TaskError, PluginError) as error:
        raise _in_file(error, where) from error
    num_trained = len(prompts) - num_held_out
    check_replay(config, [prompt.prompt_id for prompt in prompts[:num_trained]], on_note, where=where)
    for name, policy in config.policies.items():
        if policy.model and prompts and missing_model(name, policy, where) is None:
            check_prompts(config, name, prompts, on_note)
            on_prompts(name, prompts)
    if not_there:
        not_there[0].more = tuple(not_there[1:])
        raise not_there[0]
    return num_trained, num_held_out


def _check_addresses(config: RunConfig, *, where: str) -> None:
    from mrl.transport.server import check_address

    for table, host, port in _addresses(config):
        try:
            check_address(host, port)
        except AddressError as error:
            raise AddressError(error.what, where=f"{where}: [{table}] {error.where}", cure=error.cure) from None


def _addresses(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    """Yield table, host and port of every address at which the run will listen."""
    if config.exchange.host:
        yield "exchange", config.exchange.host, config.exchange.port
    if config.exchange.metrics_host:
        yield "exchange", config.exchange.metrics_host, config.exchange.metrics_port
    if config.has_gateway:
        yield "gateway", config.gateway.host, config.gateway.port


def _check_models(
    config: RunConfig,
    on_missing: Callable[[MissingError], None],
    on_unfetched: Callable[[MissingError], None],
    *,
    where: str,
) -> None:
    for name, policy in config.policies.items():
        is_of_hub = named(policy) is not None
        missing = missing_model(name, policy, where)
        if missing is not None:
            (on_unfetched if is_of_hub else on_missing)(missing)
        elif policy.model:
            anew = f"mrl fetch {where}" * is_of_hub
            check_model_folder(
                Path(policy.model),
                key=f"policies.{name}.model",
                source=policy.source,
                anew=anew,
                is_trained=not policy.frozen,
                is_embedded=policy.rollout.engine == "embedded",
            )
            check_built(policy, where=f"{where}: policies.{name}.model")
            with in_place(where):
                if name in config.learning and policy.learner.lora and policy.learner.parameter_dtype == "bfloat16":
                    check_below_adapters(Path(policy.model), key=f"policies.{name}.learner")
            check_sharing_out(config, name)
            with in_place(where):
                try_regime(config, name)
        if policy.make is not None or missing is None:
            check_context(config, name, where=where)


def check_built(policy: PolicyTable, *, where: str) -> None:
    """Raises ModelFolderError for a config.json that transformers refuses, or that describes no model for a learner."""
    from mrl.models.skeleton import config_of_folder, model_size

    with in_place(where):
        described = config_of_folder(Path(policy.model))
        if not policy.frozen:
            model_size(described)


def _in_file(error: TaskError | PluginError, where: str) -> TaskError | PluginError:
    """Return the error with the configuration's file in its place, unless it names a file of data."""
    if not error.where.startswith("tasks."):
        return error
    kind, where = type(error), f"{where}: {error.where}"
    return kind(error.what, where=where, got=error.got, wanted=error.wanted, cure=error.cure)


def check_made(config: RunConfig) -> None:
    """Raises ConfigError where a made policy, whose folder is there by now, cannot read the prompts."""
    names = [name for name, policy in config.policies.items() if policy.make is not None]
    if names:
        prompts, _ = check_tasks(
            config, on_missing=unheard, on_trial=None
        )  # nothing is missing by now, and verifiers have been tried
        for name in names:
            check_prompts(config, name, prompts, unheard)


def check_sharing_out(config: RunConfig, name: str) -> None:
    """Raises EngineError for a model that a server cannot divide between its GPUs."""
    from mrl.engines.family_limits import check_parts

    gpus = server_gpus(config, name)
    if gpus > 1:
        path, text = _described(config, name)
        check_parts(config.policies[name].rollout.engine, str(path), text, gpus)


def check_context(config: RunConfig, name: str, *, where: str) -> None:
    """Raises ConfigError for a model whose attention heads cannot be divided between the ranks that share a pass."""
    policy = config.policies[name]
    ranks = policy.learner.context_parallel
    if ranks == 1 or policy.frozen:
        return
    if policy.make is not None:
        heads, cached = policy.make.num_heads, policy.make.num_cached_heads
    else:
        _, text = _described(config, name)
        heads = int(getattr(text, "num_attention_heads", None) or 1)
        cached = int(getattr(text, "num_key_value_heads", None) or heads)
    fitting = equal_parts(heads, cached)
    if ranks not in fitting:
        raise ConfigError(
            f"policies.{name}.learner.context_parallel: the attention heads cannot be divided between so many ranks",
            where=where,
            got=f"{ranks} ranks for {heads} attention heads and {cached} key-value heads",
            wanted=f"one of {', '.join(map(str, fitting))}",
        )


def _described(config: RunConfig, name: str) -> tuple[Path, SimpleNamespace]:
    """Return the path of a model's config.json, and its part about text with keys as attributes."""
    path = Path(config.policies[name].model) / "config.json"
    return path, SimpleNamespace(**text_part(json.loads(path.read_text(encoding="utf-8"))))


def check_adapters(config: RunConfig, on_missing: Callable[[MissingError], None]) -> None:
    """Tell `on_missing` where a policy trains adapters and the package peft is not there."""
    learners = (name for name in config.learning if config.policies[name].learner.lora is not None)
    if importlib.util.find_spec("peft") is None:
        for name in learners:
            where = f"policies.{name}.learner.lora"
            on_missing(MissingError("the package peft is not installed", where=where, cure="pip install 'mrl[lora]'"))


def check_engines(config: RunConfig, on_missing: Callable[[MissingError], None]) -> None:
    """Tell `on_missing` of every engine that runs here as a server and whose environment is not there."""
    from mrl.engines.environment import engine_python

    told = set()
    for name, policy in config.policies.items():
        rollout = policy.rollout
        kind = (rollout.engine, policy.device, rollout.server.python)
        if rollout.engine == "embedded" or rollout.server.url or kind in told:
            continue
        told.add(kind)
        try:
            engine_python(rollout.engine, device=policy.device, configured=rollout.server.python)
        except EngineError as error:
            where = f"policies.{name}.rollout.engine = {rollout.engine!r}"
            on_missing(MissingError(error.what, where=where, wanted=error.where or error.wanted, cure=error.cure))


def check_tasks(
    config: RunConfig,
    on_missing: Callable[[MissingError], None],
    on_trial: "Callable[[Sequence[Trial]], None] | None" = unheard,
    *,
    on_unfetched: Callable[[MissingError], None] | None = None,
    on_note: Callable[[str], None] = unheard,
) -> "tuple[Sequence[Prompt], int]":
    """Build the prompt pool and, unless `on_trial` is None, try environments, and verifiers of the user's own.

    Returns the pool's prompts, and how many of them are held out.

    Raises TaskError for data, or a verifier, that cannot be used. `on_missing` is told of every task whose data are
    missing; `on_unfetched`, if given, is told instead of data sets that `mrl fetch` gets. `on_note` is told of rows of
    data that are left out.
    """
    from mrl.gateway.agent_trial import check_agents
    from mrl.tasks.environments.environment_trial import try_environment
    from mrl.tasks.pool import build_pool
    from mrl.tasks.sources import open_source
    from mrl.tasks.verifier_process import WALL_FACTOR
    from mrl.tasks.verifier_trial import try_verifier

    prompts: Sequence[Prompt] = ()
    num_held_out = 0
    try:
        pool = build_pool(config.tasks, config.pool, on_note=on_note)
        prompts, num_held_out = pool.prompts, len(pool.held_out)
        pool.close()
    except MissingError:
        to_fetch = unfetched_data(config)
        for task, table in config.tasks.items():
            try:
                open_source(task, table, seed=config.pool.seed)
            except MissingError as missing:
                (on_unfetched if on_unfetched and task in to_fetch else on_missing)(missing)
    if on_trial is None:
        return prompts, num_held_out
    with wait_notice("the trial of the agents, which lasts until their first requests"):
        check_agents(config, on_missing)
    for task, table in config.tasks.items():
        if table.own_verifier:
            most_s = WALL_FACTOR * table.verifier_timeout_s
            told = f"the trial of tasks.{task}: {table.verifier} on a few answers, up to {most_s:g} s each"
            with suppress(MissingError), wait_notice(told):  # `on_missing` has been told above
                on_trial(try_verifier(task, table, seed=config.pool.seed))
        if table.source == "environment":
            told = f"the trial of tasks.{task}: {table.dataset} for one turn, up to {table.episode_s:g} s"
            with suppress(MissingError), wait_notice(told):
                _check_says_again(config, task, try_environment(task, table, seed=config.pool.seed))
    return prompts, num_held_out


def _check_says_again(config: RunConfig, task: str, first: "EnvironmentTurn") -> None:
    """Raises TaskError for an environment that is not deterministic, where episodes go on from peers' first turns."""
    from mrl.sharing.regimes import goes_on_in_episodes
    from mrl.tasks.environments.opening import URLS

    if goes_on_in_episodes(config.sharing) and not first.is_deterministic:
        name = config.tasks[task].dataset
        is_server = name.startswith(URLS)
        raise TaskError(
            f"sharing.regime: {config.sharing.get('regime')} replays the turns of peers, which needs a deterministic"
            " environment",
            where=f"tasks.{task}.dataset",
            got=f"{name}{'' if is_server else ', with deterministic = False'}",
            wanted="?deterministic=yes after the URL"
            if is_server
            else "an environment whose replies follow from its seed",
            cure="set --sharing.regime sgt",
        )


def check_teacher(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError when a teacher is no policy of the run, or is to teach a task that the run does not have.

    Such a run would train by plain GRPO without a word. Also raised where a learner's kernel cannot use the units that
    teachers tell.
    """
    from mrl.sharing.copd import CopdParameters
    from mrl.sharing.regimes import check_sharing
    from mrl.sharing.rlad import RladParameters

    def check(key: str, what: str, got: str, known: Collection[str]) -> None:
        if got in known:
            return
        near = nearest(got, known)
        raise ConfigError(
            f"sharing.{key}: no such {what}",
            where=where,
            got=got,
            wanted="one of " + ", ".join(known),
            cure=f"did you mean {near!r}?" if near else "",
        )

    parameters = check_sharing(config.sharing, where)
    if isinstance(parameters, RladParameters) and parameters.teacher:
        check("rlad.teacher", "policy", parameters.teacher, config.policies)
    if isinstance(parameters, CopdParameters):
        for policy, tasks in parameters.teaches.items():
            check("copd.teaches", "policy", policy, config.policies)
            for task in tasks:
                check(f"copd.teaches.{policy}", "task", task, config.tasks)
        for name in config.learning if parameters.top_units else ():
            has_teacher = parameters.teachers_of(name, list(config.policies))
            if has_teacher and config.policies[name].learner.logprob_kernel == "liger":
                raise ConfigError(
                    f"policies.{name}.learner.logprob_kernel: this kernel does not support sharing.copd.top_units",
                    where=where,
                    got=f"liger, with top_units = {parameters.top_units}",
                    cure=f'set policies.{name}.learner.logprob_kernel = "chunked", or sharing.copd.top_units = 0',
                )


def check_frozen(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError for a frozen policy that is never asked for a score under the sharing regime."""
    for name in unasked(config, where=where):
        raise ConfigError(
            f"policies.{name}.frozen: the sharing regime does not use this frozen policy",
            where=where,
            got=f"regime {config.sharing.get('regime')!r}",
            wanted="a regime that asks frozen policies for scores, such as rlad",
            cure=f"remove policies.{name}.frozen or the policy; `mrl compare` leaves it out by itself",
        )


def check_scorers(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError for a policy that scores for peers in a server at another temperature than 1."""
    from mrl.sharing.regimes import scorers

    for name in sorted(scorers(config.sharing, config.policies)):
        rollout = config.policies[name].rollout
        if rollout.engine != "embedded" and rollout.temperature != 1.0:
            raise ConfigError(
                f"policies.{name}.rollout.temperature: {rollout.engine} computes scores only at temperature 1",
                where=where,
                got=f"{rollout.temperature}, and peers ask {name} for scores",
                wanted="1.0",
                cure=f'set it to 1.0, or set policies.{name}.rollout.engine = "embedded" (any temperature)',
            )


def unasked(config: RunConfig, *, where: str) -> list[str]:
    """Return the frozen policies that the sharing regime asks for no score. Raises ConfigError as `check_sharing`."""
    from mrl.sharing.regimes import check_sharing, scorers

    check_sharing(config.sharing, where)
    asked = scorers(config.sharing, config.policies)
    return [name for name, policy in config.policies.items() if policy.frozen and name not in asked]
