"""HACPO's term for answers of another agent.

Shapes: T tokens.
"""

from torch import Tensor

from mrl.objectives.inputs import TermInputs
from mrl.objectives.ratios import sequence_ratio
from mrl.objectives.specs import CrossSequence


def cross_sequence(spec: CrossSequence, inputs: TermInputs) -> Tensor:
    """Stepwise clipped sequence ratio times advantage, without a min.

        L_t = -c(s_t) sg[c(s_t)]^alpha A,   c(s) = clip(s, min(1, lower + m lower_step), 1)
        s   = exp( mean_t log pi_theta(y_t) - mean_t log pi_source(y_t) )

    arXiv 2603.02604, cross-agent part of the objective; A holds the capability ratio. `behaviour_T` is the source's
    mean over its own tokens, at every token of the row; m is the number of updates already made in this step. Where s
    lies outside the clip the gradient is exactly 0, whatever the sign of A. The token form of GSPO gives each token its
    share of the gradient, -s^(alpha + 1) A. Returns [T].
    """
    lower = min(1.0, spec.lower + inputs.update_index * spec.lower_step)
    ratio_T = sequence_ratio(inputs.logprobs_T, inputs.behaviour_T, inputs.row_T).clamp(lower, 1.0)
    return -ratio_T * ratio_T.detach().pow(spec.alpha) * inputs.advantages_T.detach()
