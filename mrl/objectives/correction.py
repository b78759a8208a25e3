"""Detached importance weights that carry tokens of an older or other sampler to the policy of the step's start.

Shapes: T tokens.
"""

from typing import assert_never

import torch
from torch import Tensor

from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_exp
from mrl.objectives.rows import row_mean, row_sum
from mrl.objectives.specs import Correction


@torch.no_grad()
def correction_weight(
    spec: Correction, proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, row_T: Tensor
) -> Tensor:
    """What multiplies each token's term, from k = pi_prox / pi_behaviour of the token or of its row.

        level    token k_t;  sequence prod_t k_t;  geometric (prod_t k_t)^(1/|y|)
        truncate max(lower, min(k, upper));  mask k 1[lower <= k <= upper];  gate 1[lower <= k <= upper]

    Token and truncate is the behaviour weight of decoupled PPO (arXiv 2110.00641, eq. 7) under a cap, and truncated
    importance sampling; mask is IcePop; gate over rows is sequence masking. Standing outside the clip, staleness and
    engine mismatch are not mistaken for a policy change. log k is held in [-20, 20]. No gradient flows. Returns [T].
    """
    ratio_T = bounded_exp(_log_ratio(spec, proximal_logprobs_T - behaviour_logprobs_T, row_T))
    inside_T = (ratio_T >= spec.lower) & (ratio_T <= spec.upper)
    match spec.action:
        case "truncate":
            return ratio_T.clamp(spec.lower, spec.upper)
        case "mask":
            return torch.where(inside_T, ratio_T, 0.0)
        case "gate":
            return inside_T.to(ratio_T.dtype)
    assert_never(spec.action)


def corrected(term_T: Tensor, spec: Correction | None, inputs: TermInputs) -> Tensor:
    """The term times its weight; unchanged without a correction. Returns [T]."""
    if spec is None:
        return term_T
    return correction_weight(spec, inputs.proximal_T, inputs.behaviour_T, inputs.row_T) * term_T


def _log_ratio(spec: Correction, log_ratio_T: Tensor, row_T: Tensor) -> Tensor:
    match spec.level:
        case "token":
            return log_ratio_T
        case "sequence":
            return row_sum(log_ratio_T, row_T)
        case "geometric":
            return row_mean(log_ratio_T, row_T)
    assert_never(spec.level)
