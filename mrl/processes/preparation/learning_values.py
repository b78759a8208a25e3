"""Values that decide what a policy learns: checked and shown before a run, with warnings of unusual ones."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mrl.config.defaults import LR_OF_ADAPTERS, LR_OF_ALL, RELEASED_PARAMETERS, SHARED_BYTES, shared_bytes
from mrl.config.policy_tables import PolicyTable
from mrl.config.replay_table import REPLAY
from mrl.config.rules.evaluation_rules import greedy_note
from mrl.config.schema import RunConfig
from mrl.config.table import Table
from mrl.config.task_tables import COLLECTIVE
from mrl.errors import ConfigError
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.sharing.regimes import check_episodes, check_reuse, check_votes, regime_kind, replayed_kinds
from mrl.tasks.games.game_names import GAMES

SANE_FACTOR = 20.0
"""Factor by which a learning rate may differ from the usual one, up or down, without a warning."""
SMALL_MODEL_LR = 3e-4
SHORT_ANSWER_TOKENS = 64
"""Limit of an answer's tokens below which a released model gets a warning: such models seldom answer in fewer."""
BY_SIZE = ("learner.lr", "rollout.max_new_tokens")
"""Keys whose defaults follow from the size of a model."""
UNKNOWN = "not known yet"
SHOWN = (
    "learner.lr", "learner.lr_schedule", "learner.lr_final_share", "learner.warmup_steps", "learner.weight_decay",
    "learner.max_grad_norm", "learner.prompts_per_step", "learner.minibatches", "learner.max_staleness_versions",
    "learner.precision", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "objective.method",
    "objective.advantage", "objective.clip_low", "objective.clip_high", "objective.aggregation",
    "objective.kl_coefficient", "objective.entropy_coefficient", "objective.drop_uniform_groups",
    "objective.correction.level", "objective.overlong_buffer_tokens",
)  # fmt: skip


def check_learning(config: RunConfig, *, where: str) -> None:
    """Raises ConfigError for a run in which a policy cannot learn as configured, or cannot be made for the tasks.

    A single policy has no peer to learn from. In a group of one answer no answer is better than another, so that
    nothing is learned where nothing else is trained on.
    """
    made = [name for name, policy in config.policies.items() if policy.make is not None]
    if made and not any(table.operation or table.dataset in GAMES for table in config.tasks.values()):
        raise ConfigError(
            f"policies.{made[0]}.make: no task has an operation for the made policy to learn before the run",
            where=where,
            wanted='a task with an operation, such as operation = "reverse"',
            cure=f"set policies.{made[0]}.model to a folder, or to a name on the hub, in place of this table;"
            " `mrl policies make quickstart` prints two small models",
        )
    check_episodes(config.sharing, config.tasks, where)
    check_votes(config, where)
    check_reuse(config, where)
    regime = str(config.sharing.get("regime"))
    if len(config.policies) == 1 and regime != "independent" and not replayed_kinds(config.sharing):
        (name,) = config.policies
        raise ConfigError(
            f"sharing.regime: {name} is the only policy, so there is no peer to share with",
            where=where,
            got=regime,
            wanted="two or more policies, the records of a finished run, or the regime independent",
            cure="add a [policies.NAME] table, or set --sharing.regime independent or --sharing.replay.run FOLDER",
        )
    for name in config.learning:
        if config.policies[name].rollout.group_size == 1 and regime in ("independent", "prefix", "rlad"):
            raise ConfigError(
                f"policies.{name}.rollout.group_size: a single answer always has advantage 0, so nothing is learned",
                where=where,
                got=1,
                wanted=">= 2 answers for each prompt",
                cure=f"set --policies.{name}.rollout.group_size 8",
            )


def warnings(config: RunConfig, parameters: Mapping[str, int]) -> Iterator[str]:
    """Yield warnings of settings that are allowed and seldom meant.

    `parameters`: policy -> number of parameters where it is known, 0 for made policies.
    """
    regime = str(config.sharing.get("regime"))
    if note := greedy_note(config.evaluation.temperature, config.evaluation.samples):
        yield f"evaluation.{note}"
    if REPLAY in config.sharing and not replayed_kinds(config.sharing):
        yield f"sharing.replay: the regime {regime} does not read records of a finished run, so none are loaded"
    is_voted = any(task.is_voted for task in config.tasks.values())
    if COLLECTIVE in config.sharing and not is_voted:
        yield f'sharing.{COLLECTIVE}: has no effect, because no task has verifier = "{COLLECTIVE}"'
    yield from _too_long_for_peers(config)
    sizes = {name: config.policies[name].rollout.group_size for name in config.learning}
    if is_voted and len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield (
            f"policies.X.rollout.group_size differs ({told}), and answers are judged by vote: the answers of a small"
            " group agree more often, so its vote counts for more"
        )
    for name in config.learning:
        policy = config.policies[name]
        is_released = policy.make is None and parameters.get(name, 0) >= RELEASED_PARAMETERS
        usual, whose = SMALL_MODEL_LR, "a small model"
        if is_released:
            has_adapters = policy.learner.lora is not None
            usual = LR_OF_ADAPTERS if has_adapters else LR_OF_ALL
            whose = f"{'adapters' if has_adapters else 'all weights'} of {parameters[name] / 1e9:.1f}B parameters"
        lr = policy.learner.lr
        if name in parameters and not usual / SANE_FACTOR <= lr <= usual * SANE_FACTOR:
            size = "high and may ruin the model within a few steps" if lr > usual else "low and may change nothing"
            yield f"policies.{name}.learner.lr = {lr:g} is {size}; {usual:g} is usual for {whose}"
        if is_released and policy.rollout.max_new_tokens < SHORT_ANSWER_TOKENS:
            yield (
                f"policies.{name}.rollout.max_new_tokens = {policy.rollout.max_new_tokens} is short for a released"
                " model: truncated answers are scored as they are, mostly as wrong"
            )
        if policy.learner.lora and policy.rollout.weights != "adapters" and policy.rollout.engine_dtype != "float32":
            yield (
                f"policies.{name}.rollout.weights = {policy.rollout.weights!r} merges the adapters into"
                f" {policy.rollout.engine_dtype} weights, whose rounding loses small changes, among them most of the"
                ' first steps; "adapters" keeps them (embedded engine, or a vLLM server that the run starts)'
            )
        if policy.learner.activation_offload and policy.device == "cpu":
            yield f'policies.{name}.learner.activation_offload saves no memory on "cpu" and copies needlessly'
        if policy.rollout.group_size == 1:
            yield (
                f"policies.{name}.rollout.group_size = 1: the policy's own answer is compared only with what {regime}"
                " takes from peers"
            )


def _too_long_for_peers(config: RunConfig) -> Iterator[str]:
    """Yield warnings where a policy's group, or a teacher's scores of it, may be too long for one record."""
    token_bytes = shared_bytes(config.sharing)
    what, cure = "peers do not receive such a group", "or use a smaller group_size"
    if token_bytes > SHARED_BYTES:
        what, cure = "no scores of such a group arrive", "or use a smaller group_size or top_units"
    elif "rollout" not in regime_kind(config.sharing).replays:
        return
    for name in config.learning:
        rollout = config.policies[name].rollout
        most = MAX_MESSAGE_BYTES // (token_bytes * rollout.group_size)
        if rollout.max_new_tokens > most:
            yield (
                f"policies.{name}.rollout: {rollout.group_size} answers of more than {most:,} tokens on average"
                f" exceed the limit of {MAX_MESSAGE_BYTES // 2**20} MiB for a record, and {what}:"
                f" set max_new_tokens = {most}, {cure}"
            )


def learning_rows(
    config: RunConfig, chosen: Collection[str], unknown: Collection[str] = ()
) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield (key below a learning policy, [(value, whether the key was left out) for each policy]).

    `chosen`: keys that mrl filled in. A value that the objective's method fills in is shown as it will be used.
    `unknown`: policies whose model's size is not known.
    """
    for key in SHOWN:
        cells = [_cell(config.policies[name], f"policies.{name}.{key}" in chosen, key) for name in config.learning]
        if key in BY_SIZE:
            unsaid = [
                is_default and name in unknown for name, (_, is_default) in zip(config.learning, cells, strict=True)
            ]
            cells = [(UNKNOWN, True) if hidden else cell for hidden, cell in zip(unsaid, cells, strict=True)]
        yield key, cells


def _cell(policy: PolicyTable, is_chosen: bool, key: str) -> tuple[str, bool]:
    from mrl.sharing.own_objective import METHODS

    table: Any = policy
    *above, last = key.split(".")
    for word in above:
        table = getattr(table, word)
    assert isinstance(table, Table)
    value = getattr(table, last)
    if value is None:
        value = METHODS[policy.objective.method].get(last, "off")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if last == "lr_schedule" and policy.learner.lr_final_share == 1.0:
        text = f"constant ({text} to lr_final_share 1)"
    return text, is_chosen or last not in table.model_fields_set
