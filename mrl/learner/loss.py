"""The loss of a packed batch: the term and the regularizer of every component, on its own tokens.

    coefficient_c / D_c * sum over rows, tokens of weight_t * (term_t + regularizer_t)      summed over components c

with D_c known before the first backward, so that any split into microbatches or ranks gives the same gradient: every
part adds its share, and gradients are summed, never averaged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.learner.packing import PackedBatch
from mrl.objectives.ratios import spread
from mrl.objectives.regularizer import regularizer_losses
from mrl.objectives.terms import TermInputs, UnitLogprobs, term_losses
from mrl.sharing.regime import Component


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of a batch's T answer tokens that its loss is made of. Log-probabilities and entropies in nats."""

    logprobs_T: Tensor
    proximal_T: Tensor
    """Log-probabilities under the parameters at the start of the step; no gradient, as for those of other models."""
    behaviour_T: Tensor
    """Log-probabilities under the policy that sampled; 0 for rows without behaviour."""
    teacher_T: Tensor
    """Log-probabilities under a policy that scored; NaN where none did."""
    reference_T: Tensor | None = None
    """Log-probabilities under the reference policy; None where no component has a KL penalty."""
    entropy_T: Tensor | None = None
    """Entropies in the tokens' places; None where no component has an entropy bonus."""
    unit_logprobs_TK: Tensor | None = None
    """Log-probabilities of the batch's units; None where it has none."""

    def detached(self) -> "TokenValues":
        """Return the same numbers without gradient."""
        entropy_T = None if self.entropy_T is None else self.entropy_T.detach()
        units_TK = None if self.unit_logprobs_TK is None else self.unit_logprobs_TK.detach()
        return replace(self, logprobs_T=self.logprobs_T.detach(), entropy_T=entropy_T, unit_logprobs_TK=units_TK)


def needs_reference(components: Iterable[Component]) -> bool:
    """Whether some component has a KL penalty to the policy at the start of the run."""
    return any(c.regularizer is not None and c.regularizer.kl_coefficient > 0 for c in components)


def needs_entropy(components: Iterable[Component]) -> bool:
    """Whether some component has an entropy bonus."""
    return any(c.regularizer is not None and c.regularizer.entropy_coefficient > 0 for c in components)


def component_losses(
    values: TokenValues, batch: PackedBatch, components: Sequence[Component], update_index: int
) -> list[Tensor]:
    """Return each component's weighted sum over its tokens, not yet divided: a scalar with gradient, 0 if absent."""
    losses = []
    for index, component in enumerate(components):
        mine_T = batch.component_T == index
        loss_T = term_losses(component.term, term_inputs(values, batch, mine_T, update_index))
        if component.regularizer is not None:
            loss_T = loss_T + regularizer_losses(
                component.regularizer,
                values.logprobs_T[mine_T],
                reference_T=None if values.reference_T is None else values.reference_T[mine_T],
                entropy_T=None if values.entropy_T is None else values.entropy_T[mine_T],
            )
        losses.append((batch.weights_T[mine_T] * loss_T).sum())
    return losses


def term_inputs(values: TokenValues, batch: PackedBatch, mine_T: Tensor, update_index: int) -> TermInputs:
    """Return the inputs of a term for the tokens where `mine_T` is true; their rows are numbered anew from 0."""
    own_TK, teacher_TK = values.unit_logprobs_TK, batch.unit_logprobs_TK
    units = None if own_TK is None or teacher_TK is None else UnitLogprobs(own_TK[mine_T], teacher_TK[mine_T])
    return TermInputs(
        logprobs_T=values.logprobs_T[mine_T],
        proximal_T=values.proximal_T[mine_T],
        behaviour_T=values.behaviour_T[mine_T],
        advantages_T=batch.advantages_T[mine_T],
        row_T=torch.unique(batch.row_T[mine_T], return_inverse=True)[1],
        teacher_T=values.teacher_T[mine_T],
        update_index=update_index,
        units=units,
    )


def behaviour_by_token(batch: PackedBatch, components: Sequence[Component], proximal_T: Tensor) -> Tensor:
    """Return log-probabilities of the sampling policy by token, [T]; those of spans are spread as the component says.

    Spans are spread by the own log-probabilities of their tokens at the start of the step, so that all updates of a
    step see the same.
    """
    return _by_token(batch.behaviour_logprobs_T, batch.behaviour_span_T, batch.component_T, components, proximal_T)


def teacher_by_token(batch: PackedBatch, components: Sequence[Component], proximal_T: Tensor) -> Tensor:
    """Return log-probabilities of a teacher by token, [T], as `behaviour_by_token` does for the sampling policy."""
    return _by_token(batch.teacher_logprobs_T, batch.teacher_span_T, batch.component_T, components, proximal_T)


def _by_token(
    logprobs_T: Tensor,
    span_T: Tensor | None,
    component_T: Tensor,
    components: Sequence[Component],
    proximal_T: Tensor,
) -> Tensor:
    found_T = logprobs_T
    if span_T is None:
        return found_T
    for index, component in enumerate(components):
        of_rule_T = spread(logprobs_T, proximal_T, span_T, component.spreading)
        found_T = torch.where(component_T == index, of_rule_T, found_T)
    return found_T


def shares(components: Sequence[Component], denominators: Mapping[str, float]) -> list[float]:
    """Return coefficient / denominator of each component; 0 where the denominator is 0."""
    return [c.coefficient / d if (d := denominators[c.name]) else 0.0 for c in components]
