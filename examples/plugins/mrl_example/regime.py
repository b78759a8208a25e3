"""`concise`: imitate the shortest right answer of a peer where no own right answer is as short."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from mrl.objectives.specs import Imitation
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_examples, prompt_of
from mrl.sharing.own_objective import POLICY_GRADIENT
from mrl.sharing.peer_groups import PeerGroupParameters
from mrl.sharing.peer_rollouts import RolloutReader
from mrl.sharing.regime import AbsorbResult, Component
from mrl.sharing.regimes import RegimeKind


class ConciseParameters(PeerGroupParameters):
    """The `[sharing.concise]` table."""

    coefficient: float = Field(0.1, ge=0)
    """Of the imitated answers in the loss."""
    shorter_by_bytes: int = Field(0, ge=0)
    """A peer's answer is imitated when it is at least so many bytes shorter than the shortest own right one."""


class ConciseRegime(RolloutReader):
    """Own rows, and for a prompt at most one imitated answer."""

    def __init__(self, parameters: ConciseParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        self.parameters = parameters
        imitated = Component("imitated", Imitation(), parameters.coefficient, "prompts", "peer")
        self.components = (context.objective.component(), imitated)

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """The rows of one step; an imitated row counts as the mean over its tokens."""
        own, rows, bound = own_examples(groups, self.context), [], self.context.success_reward
        for group, traces in zip(groups, self.take_traces(groups, needs_trace=False), strict=True):
            lengths = [len(answer.completion) for answer in group.answers if answer.reward >= bound]
            limit = min(lengths, default=np.inf) - self.parameters.shorter_by_bytes
            right = [one for one in traces if one.is_usable and one.answer.reward >= bound]
            shortest = min(right, key=lambda one: len(one.answer.completion), default=None)
            if shortest is not None and len(shortest.answer.completion) < limit:
                rows.append(shortest.example(prompt_of(group), component="imitated"))
        denominators = {
            POLICY_GRADIENT: self.context.objective.denominator(own.lengths),
            "imitated": float(max(1, len(groups))),
        }
        peer_lengths = [row.answer_token_ids.size for row in rows]
        return self.absorbed(own.examples + rows, denominators, peer_lengths=peer_lengths)


concise = RegimeKind(ConciseParameters, ConciseRegime, learns_of_uniform_groups=True)
