"""The clipped policy-gradient terms: PPO, GRPO, Dr.GRPO, DAPO by token, GSPO by row, with a dual clip where asked.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.correction import corrected
from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_ratio, sequence_ratio
from mrl.objectives.specs import Clipped


def clipped(spec: Clipped, inputs: TermInputs) -> Tensor:
    """`clipped_surrogate` of the ratio that `spec` names, times its correction.

    With pi_prox recomputed at the start of the step and a token correction it is decoupled PPO (arXiv 2110.00641, eq.
    7); with the sampler as base and without correction, PPO on rows of whoever sampled them. Returns [T].
    """
    base_T = inputs.proximal_T if spec.base == "proximal" else inputs.behaviour_T
    if spec.ratio == "sequence":
        ratio_T = sequence_ratio(inputs.logprobs_T, base_T, inputs.row_T)
    else:
        ratio_T = bounded_ratio(inputs.logprobs_T, base_T)
    term_T = clipped_surrogate(
        ratio_T, inputs.advantages_T, clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip
    )
    return corrected(term_T, spec.correction, inputs)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Per-token clipped surrogate, as a loss.

        L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t);   where A_t < 0:  L_t <- min(L_t, -dual A_t)

    With r = pi_theta / pi_prox, equal clips give PPO (arXiv 1707.06347, eq. 7) and, with group-normalised advantages,
    GRPO (arXiv 2402.03300, eq. 3); a larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476, eq. 8); a ratio of
    whole rows is GSPO (arXiv 2507.18071, eq. 5). The dual clip bounds what one unlikely token of a bad answer can cost
    (arXiv 1912.09729). Gradient flows through `ratio_T` only; it is exactly 0 where A_t = 0. Returns [T].
    """
    advantages_T = advantages_T.detach()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)
