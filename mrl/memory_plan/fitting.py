"""Values of keys that were left out, with which a run fits into the memory of its first host.

Only keys of policies on cores are set, and only keys that change nothing that is learned but for rounding: the answers
that an engine samples side by side, the tokens of a learner's pass, and whether the pass computes activations twice.
Small models are left as the tables say.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.defaults import RELEASED_PARAMETERS, Choice, Resolved, with_choices
from mrl.config.memory_savings import LEAST_MICROBATCH_TOKENS
from mrl.config.schema import RunConfig
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.memory_plan.run_memory import ProcessNeed, memory_plan
from mrl.processes.planning.plan import Plan
from mrl.processes.preparation.model_bytes import parameters

FILLED = 0.85
"""Share of a host's memory that the plan may fill: the plan may be off, and other programs need some too."""


def fitted_to_memory(config: RunConfig, plan: Plan, host_mib: float) -> Resolved:
    """Lower a key of the largest process again and again, until the host's processes fit or no key is left."""
    sizes = parameters(config)
    if not any(
        table.device == "cpu" and sizes.get(name, 0) >= RELEASED_PARAMETERS for name, table in config.policies.items()
    ):
        return Resolved(config, ())
    policies = {name: PolicyMemory(config, name) for name in config.policies}
    needs = _on_first_host(config, plan, policies)
    chosen: dict[str, Choice] = {}
    useless: set[str] = set()
    while _mib(needs) > FILLED * host_mib:
        choice = _smaller(needs, policies, without=useless | (_given(config) - chosen.keys()))
        if choice is None:
            break
        tried = with_choices(config, [choice]).config
        others = {name: policy.under(tried) for name, policy in policies.items()}
        fewer = _on_first_host(tried, plan, others)
        if _mib(fewer) < _mib(needs):
            config, policies, needs, chosen[choice.key] = tried, others, fewer, choice
        else:
            useless.add(choice.key)
    return Resolved(config, tuple(chosen.values()))


def _on_first_host(config: RunConfig, plan: Plan, policies: Mapping[str, PolicyMemory]) -> list[ProcessNeed]:
    return [need for need in memory_plan(config, plan, policies) if need.spec.host == plan.first_host]


def _mib(needs: list[ProcessNeed]) -> float:
    return sum(need.host_mib for need in needs)


def _smaller(needs: list[ProcessNeed], policies: Mapping[str, PolicyMemory], *, without: set[str]) -> Choice | None:
    """Return the next value of a key of the largest process that has one, `without` some keys."""
    for need in sorted(needs, key=lambda one: one.host_mib, reverse=True):
        policy = policies.get(need.spec.policy)
        if policy is None or policy.table.device != "cpu":
            continue
        for key, value in _of_learner(policy) if need.spec.role == "learner" else _of_worker(policy):
            full = f"policies.{policy.name}.{key}"
            if full not in without:
                return Choice(full, value, "otherwise the run would not fit into this host's memory")
    return None


def _of_learner(policy: PolicyMemory) -> Iterator[tuple[str, Any]]:
    tokens = policy.table.learner.microbatch_tokens // 2
    if tokens >= max(LEAST_MICROBATCH_TOKENS, policy.longest_example_tokens):
        yield "learner.microbatch_tokens", tokens
    if not policy.table.learner.activation_checkpointing:
        yield "learner.activation_checkpointing", True


def _of_worker(policy: PolicyMemory) -> Iterator[tuple[str, Any]]:
    yield from (("rollout.answers_at_once", answers) for answers in policy.fewer_answers()[:1])


def _given(config: RunConfig) -> set[str]:
    """Return the keys of policies that the user has set."""
    return {
        f"policies.{name}.{table}.{key}"
        for name, policy in config.policies.items()
        for table in ("learner", "rollout")
        for key in getattr(policy, table).model_fields_set
    }
