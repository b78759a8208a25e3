"""A control for comparisons of `sgt`: as many imitated rows, each of an own success in place of a peer's.

    PYTHONPATH=tools mrl compare CONFIG --regimes independent,sgt,science_controls:OWN_SUCCESSES

Failures are asked for and rescued as in `sgt`, with the quickstart's parameters or those of `[sharing.OWN_SUCCESSES]`.
Each rescue is then replaced by an answer of the batch that the policy itself gave, verified, to another prompt. What
`sgt` gains beyond this row comes from what peers know; the rest is imitation of verified answers, which needs no peer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.own_examples import prompt_of
from mrl.sharing.regime import Absorbed, TrainingExample
from mrl.sharing.regimes import RegimeKind
from mrl.sharing.sgt import RESCUE, SgtParameters, SgtRegime


class OwnSuccessesParameters(SgtParameters):
    """The `[sharing.OWN_SUCCESSES]` table: that of SGT, with the quickstart's values where it says nothing."""

    lambda_: float = Field(0.6, alias="lambda", ge=0, allow_inf_nan=False)
    normaliser: Literal["prompts", "rescues", "tokens"] = "rescues"


class OwnSuccesses(SgtRegime):
    """SGT whose rescues are own successes, drawn uniformly from the batch; without one a rescue is left out."""

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> Absorbed:
        """Rows and denominators of `sgt`; its normaliser "tokens" counts the tokens of peers all the same."""
        found = super().absorb(groups, step=step, rng=rng)
        own = [(group, answer) for group in groups for answer in group.answers if self._is_publishable(answer)]
        examples = [row for row in found.examples if row.component != RESCUE]
        if own:
            drawn = rng.integers(len(own), size=len(found.examples) - len(examples))
            examples += [self._own_row(*own[place]) for place in drawn]
        return replace(found, examples=examples, rescued=())

    def _own_row(self, group: ScoredGroup, answer: Answer) -> TrainingExample:
        num_tokens = answer.num_sampled_tokens
        return TrainingExample(
            prompt_token_ids=prompt_of(group),
            answer_token_ids=unpack_array(answer.token_ids, "i4"),
            component=RESCUE,
            advantages=np.zeros(num_tokens, dtype=np.float32),
            weights=np.full(num_tokens, 1 / num_tokens, dtype=np.float32),
            behaviour_logprobs=None,
            prompt_id=group.prompt_id,
            source=self.context.policy,
            is_trained=answer.is_sampled,
        )


OWN_SUCCESSES = RegimeKind(OwnSuccessesParameters, OwnSuccesses)
