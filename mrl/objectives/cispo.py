"""CISPO: the clip bounds a weight instead of removing tokens.

Shapes: T tokens.
"""

from torch import Tensor

from mrl.objectives.correction import corrected
from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_ratio
from mrl.objectives.specs import Cispo


def cispo(spec: Cispo, inputs: TermInputs) -> Tensor:
    """Per-token likelihood term with a detached, clipped ratio as its weight.

        L_t = -sg[ clip(r_t, 1 - low, 1 + high) ] A_t log pi_theta(y_t),   r_t = pi_theta(y_t) / pi_prox(y_t)

    arXiv 2506.13585, eqs. 4 and 5. No token loses its gradient. A ratio is never negative, so `clip_low` >= 1 clips
    nothing. Gradient flows through log pi_theta only: -clip(r_t) A_t. Returns [T].
    """
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.proximal_T).detach()
    weight_T = ratio_T.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return corrected(-weight_T * inputs.advantages_T.detach() * inputs.logprobs_T, spec.correction, inputs)
