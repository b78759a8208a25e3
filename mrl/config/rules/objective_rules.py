"""Rules of a `[policies.X.objective]` table: keys that are not in use, or that contradict each other.

A key is refused only if the configuration sets it; a default that is not in use is ignored.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mrl.config.policy_tables import ObjectiveTable, PolicyTable
from mrl.errors import ConfigError

FOREIGN = {"cispo": ("dual_clip",), "dppo": ("dual_clip", "clip_low")}
"""Method -> keys that it has no place for."""
UNCORRECTED = ("dppo",)
"""Methods without a correction."""
UNDIVIDED = ("dr_grpo", "dppo")
"""Methods whose advantages are not divided by a standard deviation unless the table says so."""


class Fault(NamedTuple):
    """A key of the objective and the reason against its value."""

    key: str
    what: str
    got: object
    wanted: str = ""
    cure: str = ""


def check_objective(name: str, policy: PolicyTable) -> None:
    """Raises ConfigError for the first key of the policy's objective that is not in use or contradicts another."""
    for fault in _faults(policy):
        raise ConfigError(
            f"policies.{name}.objective.{fault.key}: {fault.what}",
            got=fault.got,
            wanted=fault.wanted,
            cure=fault.cure,
        )


def _faults(policy: PolicyTable) -> Iterator[Fault]:
    objective = policy.objective
    yield from _foreign(objective)
    yield from _correction(objective)
    yield from _idle(objective)
    yield from _overlong(policy)
    if _drops_uniform(objective) and policy.rollout.group_size == 1:
        yield Fault(
            "drop_uniform_groups",
            "a group of one answer is always uniform, so nothing would be trained on",
            got=f"{objective.method} with rollout.group_size = 1",
            wanted="rollout.group_size >= 2",
        )


def _foreign(objective: ObjectiveTable) -> Iterator[Fault]:
    for key in FOREIGN.get(objective.method, ()):
        value = getattr(objective, key)
        if value is not None:
            yield Fault(key, f"the method {objective.method} does not use this key", value, cure="remove this key")


def _correction(objective: ObjectiveTable) -> Iterator[Fault]:
    correction = objective.correction
    if correction.lower > correction.upper:
        yield Fault("correction.lower", "above correction.upper", correction.lower, wanted=f"<= {correction.upper:g}")
    for key in sorted(correction.model_fields_set):
        value = getattr(correction, key)
        if objective.method in UNCORRECTED and value != "off":
            what = f"the method {objective.method} needs no correction: its ratio is relative to the sampling policy"
            yield Fault(f"correction.{key}", what, value, cure="remove this key")
        elif correction.level == "off" and key != "level":
            yield _unused(f"correction.{key}", value, 'a correction.level other than "off"')


def _idle(objective: ObjectiveTable) -> Iterator[Fault]:
    """Yield keys without effect, because another key switches off the part that they refine."""
    switches = {
        "kl_estimator": (bool(objective.kl_coefficient), "kl_coefficient > 0"),
        "overlong_penalty": (bool(objective.overlong_buffer_tokens), "overlong_buffer_tokens >= 1"),
        "max_resampling": (_drops_uniform(objective), "drop_uniform_groups = true"),
        "std_correction": (_is_divided(objective), 'advantage = "group_std"'),
    }
    for key, (is_on, wanted) in switches.items():
        if key in objective.model_fields_set and not is_on:
            yield _unused(key, getattr(objective, key), wanted)


def _overlong(policy: PolicyTable) -> Iterator[Fault]:
    buffer, limit = policy.objective.overlong_buffer_tokens, policy.rollout.max_new_tokens
    if buffer > limit:
        yield Fault(
            "overlong_buffer_tokens",
            "longer than the longest answer",
            buffer,
            wanted=f"<= rollout.max_new_tokens = {limit}",
        )


def _drops_uniform(objective: ObjectiveTable) -> bool:
    dropping = objective.drop_uniform_groups
    return objective.method == "dapo" if dropping is None else dropping


def _is_divided(objective: ObjectiveTable) -> bool:
    kind = objective.advantage
    return objective.method not in UNDIVIDED if kind is None else kind == "group_std"


def _unused(key: str, got: object, wanted: str) -> Fault:
    return Fault(key, "has no effect", got, wanted=wanted, cure=f"set {wanted}, or remove this key")
