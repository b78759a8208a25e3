"""LUFFY's policy shaping: off-policy tokens that the policy finds unlikely count more.

Shapes: T tokens.
"""

import math

import torch
from torch import Tensor

from mrl.objectives.inputs import TermInputs
from mrl.objectives.specs import Shaped


def shaped(spec: Shaped, inputs: TermInputs) -> Tensor:
    """Per-token shaped likelihood, neither ratio nor clip.

        L_t = -A_t f(pi_theta(y_t)),   f(p) = p / (p + gamma) = sigmoid(log p - log gamma)

    arXiv 2504.14945, off-policy part. f'(p) p = gamma p / (p + gamma)^2 is largest at p = gamma, where the plain
    policy gradient would favour tokens that are likely already. Gradient flows through `logprobs_T`. Returns [T].
    """
    return -inputs.advantages_T.detach() * torch.sigmoid(inputs.logprobs_T - math.log(spec.gamma))
