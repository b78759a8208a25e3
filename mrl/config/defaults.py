"""Values for keys that the user left out, where the best value follows from devices, hosts, models or data.

`by_device` runs when a configuration is read. `by_size`, `by_model`, `by_groups` and `by_data` run before it is used,
by models and data that are on this host by then. The memory of this host comes last (`mrl.memory_plan.fitting`).
`config.json` holds the values chosen. A key that the user gave is never touched. On CPUs, and with small models, every
value is the default of its table.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mrl.config.policy_tables import PolicyTable
from mrl.config.rules.unit_rules import may_sleep
from mrl.config.schema import RunConfig
from mrl.config.table import Table

GB = 1e9
GPU_CHUNK_LOGITS = 1 << 28
OF_POLICY = {
    ("rollout", "server", "start_s"): 30.0,
    ("rollout", "server", "stall_s"): 10.0,
    ("learner", "data_timeout_s"): 20.0,
    ("learner", "collective_timeout_s"): 20.0,
}
"""Key of a policy -> seconds beyond the table's default for each GB of the policy's weights on the disk."""
OF_RUN = {
    ("run", "sync_timeout_s"): 60.0,
    ("allocation", "grace_s"): 1.0,
    ("allocation", "wake_s"): 5.0,
    ("allocation", "hung_s"): 20.0,
    ("supervision", "start_s"): 10.0,
    ("supervision", "silence_s"): 5.0,
    ("supervision", "stop_s"): 10.0,
}
"""Key of the run -> seconds beyond the table's default for each GB of the largest model's weights."""

RELEASED_PARAMETERS = 100_000_000
"""Parameters of a model from which on it counts as released: pretrained on all kinds of text, it learns in small steps
and answers at length."""
LR_OF_ALL, LR_OF_ADAPTERS = 1e-6, 1e-5
"""Learning rates of released models: of all weights, and of adapters. 1e-6 is that of verl's, TRL's and most papers'
GRPO; adapters want about ten times that of all weights, in reinforcement learning too (LoRA Without Regret, Thinking
Machines 2025)."""
LONG_ANSWER_TOKENS = 1024
"""Default of `rollout.max_new_tokens` for released models."""
SHARED_BYTES, UNIT_BYTES, SHARED_STEPS = 17, 8, 2
"""Bytes in the exchange of a token of a shared group, with its log-probability and text; further bytes for each unit
that a teacher tells of the token; steps of all policies that the exchange is to hold."""
TOP_UNITS = 8
"""Default of `sharing.copd.top_units`: with it copd gains more than twice as much as without (docs/sharing/copd.md)."""

T = TypeVar("T", bound=Table)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that was chosen for a key that the user left out."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and the values that were chosen in it."""

    config: RunConfig
    choices: tuple[Choice, ...]


def by_device(config: RunConfig) -> Resolved:
    """Choose values for policies on "cuda", and for learners over several hosts."""
    found = [
        Choice(f"policies.{name}.{key}", value, why)
        for name, policy in config.policies.items()
        for chosen in (_on_gpu(policy, may_sleep(config, name)) if policy.device == "cuda" else (), _over_hosts(policy))
        for key, value, why in chosen
    ]
    return with_choices(config, found)


def by_size(config: RunConfig, weights_bytes: Mapping[str, int]) -> Resolved:
    """Choose time limits that grow with the bytes of a policy's weights; small models keep the tables' defaults."""
    sizes_gb = {name: weights_bytes.get(name, 0) / GB for name in config.policies}
    limits = [
        (("policies", name, *key), per_gb, sizes_gb[name])
        for name in config.policies
        for key, per_gb in OF_POLICY.items()
        if key[:2] != ("rollout", "server") or config.policies[name].rollout.engine != "embedded"
    ]
    limits += [(key, per_gb, max(sizes_gb.values(), default=0.0)) for key, per_gb in OF_RUN.items()]
    found = []
    for key, per_gb, size_gb in limits:
        usual_s, more_s = _default(config, key), float(round(per_gb * size_gb))
        if more_s and not _is_given(config, key):
            why = f"{usual_s:g} s plus {per_gb:g} s per GB, for {size_gb:.1f} GB of weights"
            found.append(Choice(".".join(key), usual_s + more_s, why))
    return with_choices(config, found)


def by_model(config: RunConfig, parameters: Mapping[str, int], context_tokens: Mapping[str, int]) -> Resolved:
    """Choose learning rate and answer length of released models, by their parameters and context lengths.

    An answer takes at most half of the tokens that fit the model's context, a server's context, or a learner's pass.
    """
    found = []
    for name, policy in config.policies.items():
        if policy.make is not None or parameters.get(name, 0) < RELEASED_PARAMETERS:
            continue
        size = f"{parameters[name] / 1e9:.1f}B parameters"
        if not policy.frozen and _left_out(policy.learner, "lr"):
            has_adapters = policy.learner.lora is not None
            lr, whose = (LR_OF_ADAPTERS, "adapters") if has_adapters else (LR_OF_ALL, "all weights")
            found.append(Choice(f"policies.{name}.learner.lr", lr, f"for {whose} of a model of {size}"))
        if _left_out(policy.rollout, "max_new_tokens"):
            rooms = [context_tokens.get(name, 0), 0 if policy.frozen else policy.learner.microbatch_tokens]
            if policy.rollout.engine != "embedded":
                rooms.append(policy.rollout.server.context_tokens)
            tokens = min([LONG_ANSWER_TOKENS, *(room // 2 for room in rooms if room)])
            why = f"a model of {size} gives long answers" + ", limited to half of what fits" * (
                tokens < LONG_ANSWER_TOKENS
            )
            found.append(Choice(f"policies.{name}.rollout.max_new_tokens", tokens, why))
    return with_choices(config, found)


def shared_bytes(sharing: Mapping[str, Any]) -> int:
    """Return the exchange's bytes for a token that is shared or scored, under this `[sharing]` table."""
    parameters = sharing.get("copd", {}) if sharing["regime"] == "copd" else None
    num_units = parameters.get("top_units", TOP_UNITS) if isinstance(parameters, Mapping) else None
    return SHARED_BYTES + UNIT_BYTES * (num_units if isinstance(num_units, int) else 0)


def by_groups(config: RunConfig) -> Resolved:
    """Choose an exchange that holds the groups of all policies at their longest.

    In a smaller one, the oldest groups would be removed before peers see them.
    """
    policies = [config.policies[name] for name in config.learning]
    tokens = SHARED_STEPS * sum(
        one.learner.prompts_per_step * one.rollout.group_size * one.rollout.max_new_tokens for one in policies
    )
    mib = math.ceil(tokens * shared_bytes(config.sharing) / 2**20)
    is_shared = config.sharing["regime"] != "independent"
    if not is_shared or not _left_out(config.exchange, "budget_mib") or mib <= config.exchange.budget_mib:
        return Resolved(config, ())
    why = f"{SHARED_STEPS} steps of all policies are at most {tokens:,} tokens of {shared_bytes(config.sharing)} bytes"
    return with_choices(config, [Choice("exchange.budget_mib", mib, why)])


def by_data(config: RunConfig, held: Mapping[str, int]) -> Resolved:
    """Choose all prompts of files that hold fewer than the pool would take.

    `held`: key of the pool -> prompts in the files.
    """
    found = []
    for key, number in held.items():
        usual = type(config.pool).model_fields[key].default
        if _left_out(config.pool, key):
            found.append(
                Choice(f"pool.{key}", 0, f"uses all {number} prompts of the files, fewer than the default of {usual}")
            )
    return with_choices(config, found)


def _on_gpu(policy: PolicyTable, sleeps: bool) -> Iterator[tuple[str, Any, str]]:
    learner, rollout = policy.learner, policy.rollout
    if not policy.frozen:
        precision = learner.precision
        if _left_out(learner, "precision"):
            precision = "bfloat16"
            yield (
                "learner.precision",
                precision,
                "on a GPU several times as fast as float32, and needed for flash attention",
            )
        if precision == "bfloat16" and _left_out(learner, "attention_kernel"):
            yield (
                "learner.attention_kernel",
                "auto",
                "varlen if a test at the start shows that GPU and model support it",
            )
        if _left_out(learner, "chunk_logits"):
            yield "learner.chunk_logits", GPU_CHUNK_LOGITS, "the head's gradient is read and written once per chunk"
    has_adapters = rollout.engine != "sglang" and not rollout.server.url and learner.lora is not None
    if has_adapters and _left_out(rollout, "weights"):
        if rollout.engine == "vllm" and (policy.turns or sleeps):
            yield "rollout.weights", "files", "a sleeping vLLM engine discards the base weights that adapters need"
        else:
            why = "adapters are rounded as in the learner, and the base weights are not sent again"
            yield "rollout.weights", "adapters", why
    if rollout.engine == "embedded" and _left_out(rollout, "embedded_dtype"):
        yield "rollout.embedded_dtype", "bfloat16", "on a GPU half the memory, and several times as fast"
    if rollout.engine != "embedded" and _left_out(rollout.server, "dtype"):
        yield "rollout.server.dtype", "bfloat16", "on a GPU half the memory, and several times as fast"


def _over_hosts(policy: PolicyTable) -> Iterator[tuple[str, Any, str]]:
    """Yield shards within each host and replicas across hosts.

    A rank alone on its host shares nothing, unless a `shard_size` is given.
    """
    learner = policy.learner
    if policy.frozen or learner.hosts == 1 or not _left_out(learner, "sharding"):
        return
    if learner.shard_size > 1:
        yield "learner.sharding", "shard", f"learner.shard_size = {learner.shard_size}"
    elif learner.ranks_per_host > 1 and not learner.shard_size:
        why = (
            f"the {learner.ranks_per_host} ranks of a host share a copy, and only gradients are exchanged between hosts"
        )
        yield "learner.sharding", "shard", why


def _left_out(table: Table, key: str) -> bool:
    return key not in table.model_fields_set


def _table_of(config: RunConfig, key: tuple[str, ...]) -> Table:
    table: Any = config
    for word in key[:-1]:
        table = table[word] if isinstance(table, dict) else getattr(table, word)
    assert isinstance(table, Table)
    return table


def _is_given(config: RunConfig, key: tuple[str, ...]) -> bool:
    return not _left_out(_table_of(config, key), key[-1])


def _default(config: RunConfig, key: tuple[str, ...]) -> float:
    return float(type(_table_of(config, key)).model_fields[key[-1]].default)


def with_choices(config: RunConfig, choices: list[Choice]) -> Resolved:
    """Return `config` with the values of these choices, and the choices."""
    for choice in choices:
        config = _replaced(config, choice.key.split("."), choice.value)
    return Resolved(config, tuple(choices))


def _replaced(table: T, key: list[str], value: Any) -> T:
    """Return a copy of a table with another value at a key."""
    first, *rest = key
    if rest and first == "policies":
        policies = getattr(table, first)
        value = policies | {rest[0]: _replaced(policies[rest[0]], rest[1:], value)}
    elif rest:
        value = _replaced(getattr(table, first), rest, value)
    return table.model_copy(update={first: value})
