"""Variants of SGT, for those who ask whether its gate and its weights can be improved; each changes one thing.

    PYTHONPATH=tools mrl compare CONFIG --regimes sgt,science_variants:LIKELY

LIKELY weighs each rescue by the probability that the policy itself gives to it at the start of the step, as the
geometric mean of its tokens. LIKELY_3 does the same with three times the coefficient. SHAPED weighs each token by the
slope of f(p) = p / (p + 0.1), as LUFFY does (arXiv 2504.14945), with four times the coefficient, so that no token
weighs more than in `sgt`. STAYING rescues a prompt only when the own group before failed on it, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mrl.objectives.specs import Clipped, Grafted, Shaped, Term
from mrl.records.rollouts import ScoredGroup
from mrl.sharing.context import SharingContext
from mrl.sharing.regime import AbsorbResult
from mrl.sharing.regimes import RegimeKind
from mrl.sharing.sgt import RESCUE, SgtParameters, SgtRegime


class Weighted(SgtRegime):
    """SGT whose rescues enter the loss by another term, with the coefficient times `strength`."""

    term: Term
    strength = 1.0

    def __init__(self, parameters: SgtParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        own, rescue = self.components
        self.components = (own, replace(rescue, term=self.term, coefficient=self.strength * rescue.coefficient))

    def absorb(self, groups: Sequence[ScoredGroup], *, step: int, rng: np.random.Generator) -> AbsorbResult:
        """See Regime. Every token of a rescue has the advantage 1, by which these terms multiply."""
        found = super().absorb(groups, step=step, rng=rng)
        examples = [
            replace(row, advantages=np.ones_like(row.advantages)) if row.component == RESCUE else row
            for row in found.examples
        ]
        return replace(found, examples=examples)


class Likely(Weighted):
    """SGT whose rescues weigh as much as the policy finds them likely."""

    # Beside a source's log-probability of 0 GRAFT's weight is the row's own likelihood.
    term = Grafted(Clipped(), floor=0.0)


class LikelyThrice(Likely):
    """The same with three times the coefficient."""

    strength = 3.0


class ShapedRescues(Weighted):
    """SGT whose tokens weigh by LUFFY's shaping."""

    term = Shaped(0.1)
    strength = 4.0


class Staying(SgtRegime):
    """SGT that leaves the first failure on a prompt alone."""

    def __init__(self, parameters: SgtParameters, context: SharingContext) -> None:
        super().__init__(parameters, context)
        self._failed_before: set[str] = set()

    def asks(self, group: ScoredGroup) -> list[str]:
        """See Regime."""
        has_failed = all(answer.reward < self.context.success_reward for answer in group.answers)
        if has_failed and group.prompt_id not in self._failed_before:
            self._failed_before.add(group.prompt_id)
            if self.context.objective.drop_uniform_groups:
                self._droppable.add(group.ticket)
            return []
        if not has_failed:
            self._failed_before.discard(group.prompt_id)
        return super().asks(group)

    def state(self) -> dict[str, Any]:
        """See Regime."""
        return super().state() | {"failed_before": sorted(self._failed_before)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Regime."""
        super().restore(state)
        self._failed_before = set(state["failed_before"])


LIKELY = RegimeKind(SgtParameters, Likely)
LIKELY_3 = RegimeKind(SgtParameters, LikelyThrice)
SHAPED = RegimeKind(SgtParameters, ShapedRescues)
STAYING = RegimeKind(SgtParameters, Staying)
