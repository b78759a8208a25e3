"""Own groups as training examples: the sampled ids, with the advantages that a regime gives them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mrl.records.chosen_experts import Experts
from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.own_objective import POLICY_GRADIENT, OwnObjective
from mrl.sharing.regime import Int32s, TrainingExample


class _Prompt(NamedTuple):
    """The prompt of a group; all rows of the group hold the same arrays."""

    token_ids: Int32s
    experts: Experts | None


class OwnExamples(NamedTuple):
    """Training examples of own groups."""

    examples: list[TrainingExample]
    lengths: list[int]
    """Sampled tokens of all own answers that are not masked. Answers whose rows were left out count too."""


def own_examples(
    groups: Sequence[ScoredGroup],
    context: SharingContext,
    *,
    advantages: Sequence[Float32s] | None = None,
    keep_idle: bool = False,
    keep_masked: bool = False,
) -> OwnExamples:
    """Return one row for every own answer. `advantages` are [G] for each group; by default they are the policy's own.

    A group whose advantages are all exactly zero has no gradient, so its rows are left out. They stay where the
    objective has a regularizer. They also stay with `keep_idle`, for regimes in which their places among the
    minibatches count. The row of an answer that the objective masks is left out; with `keep_idle` or `keep_masked` it
    keeps its place, and its weights are 0.
    """
    objective = context.objective
    keep_masked = keep_masked or keep_idle
    keep_idle = keep_idle or objective.regularizer is not None
    if advantages is None:
        advantages = [own_advantages(group, objective) for group in groups]
    examples: list[TrainingExample] = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        if keep_idle or advantages_G.any():
            prompt = _prompt(group)
            examples += [
                _own_row(group, prompt, answer, advantage, context)
                for answer, advantage in zip(group.answers, advantages_G, strict=True)
                if keep_masked or not objective.masks(answer)
            ]
    answers = (answer for group in groups for answer in group.answers if not objective.masks(answer))
    return OwnExamples(examples, [answer.num_sampled_tokens for answer in answers])


def own_advantages(group: ScoredGroup, objective: OwnObjective) -> Float32s:
    """Return the [G] advantages of a group, from its own rewards alone."""
    return objective.advantages(objective.rewards(group))


def prompt_of(group: ScoredGroup) -> Int32s:
    """Return the [P] ids of an own group's prompt."""
    return unpack_array(group.prompt_token_ids, "i4")


def _prompt(group: ScoredGroup) -> _Prompt:
    token_ids, told = prompt_of(group), group.prompt_experts
    return _Prompt(token_ids, None if told is None else told.unpacked(token_ids.size - 1))


def _own_row(
    group: ScoredGroup, prompt: _Prompt, answer: Answer, advantage: np.float32, context: SharingContext
) -> TrainingExample:
    num_tokens = answer.num_sampled_tokens
    return TrainingExample(
        prompt_token_ids=prompt.token_ids,
        answer_token_ids=unpack_array(answer.token_ids, "i4"),
        component=POLICY_GRADIENT,
        advantages=np.full(num_tokens, advantage, dtype=np.float32),
        weights=context.objective.weights(num_tokens) * (not context.objective.masks(answer)),
        behaviour_logprobs=unpack_array(answer.logprobs, "f4"),
        prompt_id=group.prompt_id,
        source=context.policy,
        is_trained=answer.is_sampled,
        row_starts=answer.row_starts,
        experts=None if answer.experts is None else answer.experts.unpacked(num_tokens),
        prompt_experts=prompt.experts,
    )
