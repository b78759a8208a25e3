"""No sharing: every policy trains on its own groups by GRPO. The baseline, and the own half of the other regimes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mrl.config.schema import Table
from mrl.records.codec import unpack_array
from mrl.records.experience import ExperienceRecord, Received
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.advantages import grpo_advantages
from mrl.sharing.regime import Absorbed, Asking, Author, Component, TrainingExample

POLICY_GRADIENT = Component("policy_gradient", "policy_gradient", coefficient=1.0, denominator="rows")
"""GRPO's aggregation: the mean over rows of token means (weights 1/T, denominator rows)."""


class IndependentParameters(Table):
    """The `[sharing.independent]` table: there is nothing to set."""


class IndependentRegime:
    """GRPO on own groups; publishes nothing and asks for nothing."""

    components: tuple[Component, ...] = (POLICY_GRADIENT,)
    reads: frozenset[str] = frozenset()
    asking: Asking | None = None

    def __init__(self, parameters: IndependentParameters, *, policy: str) -> None:
        self.parameters = parameters
        self.policy = policy

    def publish(self, group: ScoredGroup, author: Author) -> list[ExperienceRecord]:
        """Nothing."""
        return []

    def asks(self, group: ScoredGroup) -> list[str]:
        """Nothing."""
        return []

    def awaited(self) -> list[str]:
        """Nothing."""
        return []

    def absorb(
        self, groups: Sequence[ScoredGroup], received: Sequence[Received], *, step: int, rng: np.random.Generator
    ) -> Absorbed:
        """Own rows only."""
        examples, rows = own_rows(groups, source=self.policy)
        return Absorbed(examples, {POLICY_GRADIENT.name: rows}, forget=[], counts={}, rescued=[])

    def state(self) -> dict[str, Any]:
        """Stateless."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def own_rows(groups: Sequence[ScoredGroup], *, source: str) -> tuple[list[TrainingExample], float]:
    """The GRPO rows of own groups, and the denominator of their component.

    Groups of equal rewards have advantage exactly 0; their rows are left out of the list and counted in the
    denominator.
    """
    num_rows = sum(len(group.answers) for group in groups)
    examples = []
    for group in groups:
        advantages_G = grpo_advantages([answer.reward for answer in group.answers])
        if not advantages_G.any():
            continue
        prompt_token_ids = unpack_array(group.prompt_token_ids, "i4")
        for answer, advantage in zip(group.answers, advantages_G, strict=True):
            examples.append(_own_row(group.prompt_id, prompt_token_ids, answer, advantage, source))
    return examples, float(max(1, num_rows))


def _own_row(
    prompt_id: str, prompt_token_ids: np.ndarray, answer: Answer, advantage: np.float32, source: str
) -> TrainingExample:
    answer_token_ids = unpack_array(answer.token_ids, "i4")
    num_tokens = len(answer_token_ids)
    return TrainingExample(
        prompt_token_ids=prompt_token_ids,
        answer_token_ids=answer_token_ids,
        component=POLICY_GRADIENT.name,
        advantages=np.full(num_tokens, advantage, dtype=np.float32),
        weights=length_mean_weights(num_tokens),
        behaviour_logprobs=unpack_array(answer.logprobs, "f4"),
        prompt_id=prompt_id,
        source=source,
    )


def length_mean_weights(num_tokens: int, *, rows_sharing: int = 1) -> np.ndarray:
    """[T] weights 1 / (T k) that make a row its token mean, shared by `rows_sharing` = k rows of one prompt."""
    return np.full(num_tokens, 1.0 / (num_tokens * rows_sharing) if num_tokens else 0.0, dtype=np.float32)
