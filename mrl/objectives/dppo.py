"""DPPO: the trust region is a gap between probabilities, not a ratio of them.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import bounded_ratio
from mrl.objectives.specs import Dppo


def dppo(spec: Dppo, inputs: TermInputs) -> Tensor:
    """Policy-gradient term of the tokens whose probability has not yet moved too far, and a pull back for all.

        L_t = -keep_t A_t r_t + penalty (log r_t)^2,   r_t = pi_theta(y_t) / pi_behaviour(y_t)
        keep_t = 0  where A_t > 0 and pi_theta - pi_behaviour >  gap
                 or where A_t < 0 and pi_theta - pi_behaviour < -gap,  else 1

    The rule of prime-rl (total-variation mask, squared log-ratio penalty). A rare token may grow by a large factor, a
    likely one may not. Gradient flows through log pi_theta in both summands, none through keep. Returns [T].
    """
    logprobs_T, behaviour_T, advantages_T = inputs.logprobs_T, inputs.behaviour_T.detach(), inputs.advantages_T.detach()
    gap_T = logprobs_T.detach().exp() - behaviour_T.exp()
    moved_T = torch.where(advantages_T > 0, gap_T, -gap_T)
    keep_T = (moved_T <= spec.max_probability_gap).to(logprobs_T.dtype)
    reward_T = keep_T * advantages_T * bounded_ratio(logprobs_T, behaviour_T)
    return spec.penalty * (logprobs_T - behaviour_T).square() - reward_T
