"""Rules that span several tables of a configuration."""

from typing import get_args

from mrl.config.policy_tables import ObjectiveTable
from mrl.config.rules.agent_rules import check_agent_tables
from mrl.config.rules.evaluation_rules import check_draws
from mrl.config.rules.policy_rules import check_policy
from mrl.config.rules.reward_rules import check_rewards
from mrl.config.rules.unit_rules import check_units, may_sleep
from mrl.config.schema import TRACKER_NAMES, RunConfig
from mrl.config.task_tables import SOURCE_NAMES
from mrl.errors import ConfigError, in_place
from mrl.plugins import SOURCE, TRACKER, VERIFIER, find_plugin


def check_rules(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError, at `where`, for the first pair of keys that contradict each other."""
    with in_place(where):
        _check_tables(config)


def _check_tables(config: RunConfig) -> None:
    _check_names(config)
    _check_trackers(config)
    check_agent_tables(config)
    _check_serving(config)
    for name, policy in config.policies.items():
        check_policy(name, policy)
    _check_learning(config)
    if config.allocation.units or config.allocation.unit_types:
        check_units(config)
    else:
        _check_slots(config)
    _check_sleepers(config)
    _check_ttl(config)
    _check_exchange(config)
    check_rewards(config)
    check_draws(config.evaluation.samples, config.evaluation.k, key="evaluation.k")
    if not isinstance(config.sharing.get("regime"), str):
        raise ConfigError(
            "sharing.regime: missing" if "regime" not in config.sharing else "sharing.regime: invalid value",
            got=config.sharing.get("regime", ""),
            wanted="the name of a sharing regime in quotes",
            cure='set regime in [sharing], for example regime = "independent"',
        )
    if config.sharing["regime"] in get_args(ObjectiveTable.model_fields["method"].annotation):
        raise ConfigError(
            "sharing.regime: an objective is not a sharing regime",
            got=config.sharing["regime"],
            wanted="independent to train without sharing, or the name of a regime",
            cure="set --sharing.regime independent; the key of the objective is policies.NAME.objective.method",
        )
    if 0 < config.pool.train_prompts < len(config.tasks):
        raise ConfigError(
            "pool.train_prompts: fewer prompts than tasks",
            got=config.pool.train_prompts,
            wanted=f">= {len(config.tasks)}",
        )


def _check_trackers(config: RunConfig) -> None:
    for place, tracker in enumerate(config.trackers):
        if tracker.kind not in TRACKER_NAMES:
            find_plugin(TRACKER, tracker.kind, TRACKER_NAMES, where=f"trackers.{place}.kind")
        if tracker.samples and not config.run.rollouts_mib:
            raise ConfigError(
                f"trackers.{place}.samples: samples come from kept answers, but run.rollouts_mib = 0 keeps none",
                got=tracker.samples,
                cure=f"set --run.rollouts_mib 64, or remove trackers.{place}.samples",
            )


def _check_serving(config: RunConfig) -> None:
    """Check that a synchronous run serves no requests.

    The requests that are sampled together decide every bit, and requests from outside come at any time.
    """
    if config.gateway.serve and config.run.sync:
        raise ConfigError(
            "gateway.serve: a synchronous run cannot answer other requests",
            got="run.sync = true",
            cure="set --run.sync false; or set --gateway.serve false, and `mrl export` a checkpoint",
        )
    if config.gateway.kept_versions and not config.gateway.serve:
        raise ConfigError(
            "gateway.kept_versions: requires gateway.serve",
            got=f"{config.gateway.kept_versions}, with gateway.serve = false",
            cure="set --gateway.serve true",
        )


def _check_names(config: RunConfig) -> None:
    """Check the names of sources and verifiers by metadata alone, as those of trackers; nothing is imported."""
    for task, table in config.tasks.items():
        if table.source not in SOURCE_NAMES:
            find_plugin(SOURCE, table.source, SOURCE_NAMES, where=f"tasks.{task}.source")
        if table.own_verifier:
            find_plugin(VERIFIER, table.own_verifier, (), where=f"tasks.{task}.verifier")


def _check_exchange(config: RunConfig) -> None:
    table = config.exchange
    if ":" in table.host:
        raise ConfigError(
            "exchange.host: not an IPv4 address or host name",
            got=table.host,
            wanted='an IPv4 address of this host, a name that resolves to one, or "0.0.0.0" for all of them',
            cure="set the port in exchange.port" if table.host.count(":") == 1 else "",
        )
    for key in ("port", "metrics_port"):
        host = key.replace("port", "host")
        if getattr(table, key) and not getattr(table, host):
            raise ConfigError(
                f"exchange.{key}: a port without exchange.{host}",
                got=getattr(table, key),
                cure=f"set --exchange.{host} 127.0.0.1, or remove exchange.{key}",
            )
    if table.metrics_host and table.port and table.port == table.metrics_port:
        raise ConfigError(
            "exchange.metrics_port: already used as exchange.port",
            got=table.metrics_port,
            wanted=f"a port other than {table.port}, or 0 for a free one",
        )


def _check_sleepers(config: RunConfig) -> None:
    """Check that some engine can sleep where engines are to, and that none needs weights that its sleep gives up.

    vLLM gives all weights of a GPU back when it goes to sleep; with adapters, only adapters come after its waking.
    """
    if config.allocation.residency == "sleep" and not any(may_sleep(config, name) for name in config.policies):
        raise ConfigError(
            'allocation.residency = "sleep": no engine of this run can sleep',
            got="no policy that learns with device = 'cuda' and leased units",
            wanted='"stop", for engines on CPUs and for runs without allocation.units',
        )
    for name, policy in config.policies.items():
        if policy.rollout.engine == "vllm" and policy.rollout.weights == "adapters" and may_sleep(config, name):
            raise ConfigError(
                f"policies.{name}.rollout.weights: a sleeping vLLM engine discards the base weights that adapters need",
                got="adapters for vllm on cuda, which sleeps",
                wanted='allocation.residency = "stop", or weights = "files"',
            )


def _check_learning(config: RunConfig) -> None:
    """Check that some policy learns, that warm-ups end, and that policies which step together save the same steps.

    With different steps saved, policies that step together could not go on together.
    """
    if not config.learning:
        raise ConfigError("policies: all policies are frozen", wanted="at least one policy that learns")
    for name in config.learning:
        warmup_steps = config.policies[name].learner.warmup_steps
        if warmup_steps >= config.run.steps:
            raise ConfigError(
                f"policies.{name}.learner.warmup_steps: the run ends within the warm-up",
                got=warmup_steps,
                wanted=f"< run.steps = {config.run.steps}",
            )
    every = {name: config.policies[name].learner.checkpoint_every for name in config.learning}
    if config.run.sync and len(set(every.values())) > 1:
        name = list(every)[-1]
        raise ConfigError(
            f"policies.{name}.learner.checkpoint_every: policies of a synchronous run must save the same steps",
            got=every[name],
            wanted=f"{every[config.learning[0]]} as for {config.learning[0]}",
        )


def _check_slots(config: RunConfig) -> None:
    allocation, num_policies = config.allocation, len(config.learning)
    if allocation.floor_slots * num_policies > allocation.slots:
        raise ConfigError(
            f"allocation.floor_slots: the floors of {num_policies} policies exceed all slots",
            got=f"{num_policies} * {allocation.floor_slots} > {allocation.slots}",
            wanted=f"floor_slots <= {allocation.slots // num_policies} or slots >= "
            f"{allocation.floor_slots * num_policies}",
        )
    for name, policy in config.policies.items():
        if policy.frozen:
            continue  # its worker scores and holds no lease
        least = policy.rollout.group_size * policy.rollout.workers
        if allocation.floor_slots < least:  # a worker starts a group only when its lease holds all of it
            raise ConfigError(
                "allocation.floor_slots: too few for one whole group per worker, so no group would ever start",
                got=allocation.floor_slots,
                wanted=f">= {least} = group_size * workers of policies.{name}",
                cure=f"set --allocation.floor_slots {least}, or a smaller group_size",
            )


def _check_ttl(config: RunConfig) -> None:
    allocation = config.allocation
    if strangers := sorted(set(allocation.weights) - set(config.learning)):
        raise ConfigError(
            "allocation.weights: not a policy that learns",
            got=", ".join(strangers),
            wanted=f"policies out of {', '.join(config.learning)}",
        )
    if allocation.ttl_s <= allocation.period_s:
        raise ConfigError(
            "allocation.ttl_s: a lease would expire before it can be renewed",
            got=allocation.ttl_s,
            wanted=f"> period_s = {allocation.period_s}",
        )
