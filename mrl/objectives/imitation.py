"""The imitation term: raise the likelihood of a text that is known to be right.

Shapes: T tokens.
"""

from torch import Tensor

from mrl.objectives.inputs import TermInputs
from mrl.objectives.specs import Imitation


def imitation(spec: Imitation, inputs: TermInputs) -> Tensor:
    """Per-token negative log-likelihood of given tokens.

        L_t = -log pi_theta(y*_t | x, y*_<t)

    The residual term of success-gated transfer (SGT, arXiv 2605.07244) is the mean of it over the tokens of one
    verified peer answer: no ratio, no clip, no advantage. Gradient flows through `logprobs_T`. Returns [T].
    """
    return -inputs.logprobs_T
