"""A policy's own groups as training examples: the ids that were sampled, and the advantages that a regime gave them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import Float32s
from mrl.sharing.context import SharingContext
from mrl.sharing.own_objective import POLICY_GRADIENT, OwnObjective
from mrl.sharing.regime import Int32s, TrainingExample


class OwnExamples(NamedTuple):
    """Rows of own groups, and the lengths in tokens of all answers, those of left-out rows included."""

    examples: list[TrainingExample]
    lengths: list[int]


def own_examples(
    groups: Sequence[ScoredGroup],
    context: SharingContext,
    *,
    advantages: Sequence[Float32s] | None = None,
    keep_idle: bool = False,
) -> OwnExamples:
    """Own answers with their advantages, [G] per group; without `advantages` the policy's own.

    A group whose advantages are all exactly zero moves nothing: its rows are left out, unless they are regularised or
    `keep_idle` says that their places in the order of minibatches count.
    """
    objective = context.objective
    keep_idle = keep_idle or objective.regularizer is not None
    if advantages is None:
        advantages = [own_advantages(group, objective) for group in groups]
    examples: list[TrainingExample] = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        if keep_idle or advantages_G.any():
            prompt = prompt_of(group)
            examples += [
                _own_row(group.prompt_id, prompt, answer, advantage, context)
                for answer, advantage in zip(group.answers, advantages_G, strict=True)
            ]
    return OwnExamples(examples, [len(answer.token_ids) // 4 for group in groups for answer in group.answers])


def own_advantages(group: ScoredGroup, objective: OwnObjective) -> Float32s:
    """[G] from the group's own rewards alone."""
    return objective.advantages(objective.rewards(group))


def prompt_of(group: ScoredGroup) -> Int32s:
    """[P] the prompt of an own group in own tokens."""
    return unpack_array(group.prompt_token_ids, "i4")


def _own_row(
    prompt_id: str, prompt_token_ids: Int32s, answer: Answer, advantage: np.float32, context: SharingContext
) -> TrainingExample:
    answer_token_ids = unpack_array(answer.token_ids, "i4")
    num_tokens = len(answer_token_ids)
    return TrainingExample(
        prompt_token_ids=prompt_token_ids,
        answer_token_ids=answer_token_ids,
        component=POLICY_GRADIENT,
        advantages=np.full(num_tokens, advantage, dtype=np.float32),
        weights=context.objective.weights(num_tokens),
        behaviour_logprobs=unpack_array(answer.logprobs, "f4"),
        prompt_id=prompt_id,
        source=context.policy,
    )
