"""GRAFT's term: whole groups of a peer, row by row gated and weighted by how likely the receiver finds them.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.clipped import clipped
from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_exp
from mrl.objectives.rows import row_mean
from mrl.objectives.specs import Grafted


def grafted(spec: Grafted, inputs: TermInputs) -> Tensor:
    """`graft_weight` times the clipped term, whose ratio is the receiver's own pi_theta / pi_prox.

    From "Learning beyond what you sample" (GRAFT). Gradient flows through the clipped term only. Returns [T].
    """
    weight_T = graft_weight(inputs.proximal_T, inputs.behaviour_T, inputs.row_T, floor=spec.floor)
    return weight_T * clipped(spec.clipped, inputs)


def graft_weight(proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, row_T: Tensor, *, floor: float) -> Tensor:
    """Weight of each token's row, from the parameters at the start of the step.

        w = 1[s > floor] min(s, 1),   s = exp( mean_t log pi_prox(y_t) - mean_t log pi_source(y_t) )

    `behaviour_logprobs_T` is the source's mean over its own tokens, at every token of the row. No gradient flows.
    Returns [T].
    """
    ratio_T = bounded_exp(row_mean(proximal_logprobs_T - behaviour_logprobs_T, row_T))
    return torch.where(ratio_T > floor, ratio_T.clamp(max=1.0), 0.0)
