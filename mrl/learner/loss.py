"""The loss of a packed batch: every component's term on its own tokens, and what is added to it.

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
    """What is known of a batch's T answer tokens when its loss is taken. Log-probabilities and entropies in nats."""

    logprobs_T: Tensor
    proximal_T: Tensor
    """Under the parameters at the start of the step. It carries no gradient, as what others say carries none."""
    behaviour_T: Tensor
    """Under the policy that sampled; 0 for rows without behaviour."""
    teacher_T: Tensor
    """Under a policy that scored; NaN where none did."""
    reference_T: Tensor | None = None
    """Under the reference policy; None where no component is held to it."""
    entropy_T: Tensor | None = None
    """None where no component has an entropy bonus."""
    unit_logprobs_TK: Tensor | None = None
    """Of the batch's units; None where it has none."""

    def detached(self) -> "TokenValues":
        """The same numbers without gradient."""
        entropy_T = None if self.entropy_T is None else self.entropy_T.detach()
        units_TK = None if self.unit_logprobs_TK is None else self.unit_logprobs_TK.detach()
        return replace(self, logprobs_T=self.logprobs_T.detach(), entropy_T=entropy_T, unit_logprobs_TK=units_TK)


def needs_reference(components: Iterable[Component]) -> bool:
    """Whether some component is held to the policy at the start of the run."""
    return any(c.regularizer is not None and c.regularizer.kl_coefficient > 0 for c in components)


def needs_entropy(components: Iterable[Component]) -> bool:
    """Whether some component has an entropy bonus."""
    return any(c.regularizer is not None and c.regularizer.entropy_coefficient > 0 for c in components)


def component_losses(
    values: TokenValues, batch: PackedBatch, components: Sequence[Component], update_index: int
) -> list[Tensor]:
    """Per component the weighted sum over its tokens, not yet divided: a scalar with gradient, exact 0 if absent."""
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
    """The tokens where `mine_T` is true, as their term sees them; their rows are numbered anew from 0."""
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
    """[T] log-probs of who sampled, those of spans read as the component of their row says.

    Spans are read by what the policy gave to their tokens when the step began, so that all its updates see the same.
    """
    return _by_token(batch.behaviour_logprobs_T, batch.behaviour_span_T, batch.component_T, components, proximal_T)


def teacher_by_token(batch: PackedBatch, components: Sequence[Component], proximal_T: Tensor) -> Tensor:
    """[T] log-probs of a teacher, read as `behaviour_by_token` reads those of the sampler."""
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
    """coefficient / denominator of each component; 0 where there is nothing to divide by."""
    return [c.coefficient / d if (d := denominators[c.name]) else 0.0 for c in components]
