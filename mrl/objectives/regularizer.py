"""What is added to a term whatever the advantages say: a pull to the reference policy, and an entropy bonus.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.kl import reference_divergence
from mrl.objectives.specs import Regularizer


def regularizer_losses(
    spec: Regularizer, logprobs_T: Tensor, *, reference_T: Tensor | None = None, entropy_T: Tensor | None = None
) -> Tensor:
    """kl_coefficient * KL(pi_theta || pi_ref)_t - entropy_coefficient * H_t, in nats. Returns [T].

    `reference_T` are log-probabilities of the reference, `entropy_T` entropies of the policy with their gradient; each
    is needed only where its coefficient is not 0. Gradient flows through `logprobs_T` and `entropy_T`.
    """
    loss_T = torch.zeros_like(logprobs_T)
    if spec.kl_coefficient:
        assert reference_T is not None, "a divergence needs the reference's log-probabilities"
        loss_T = loss_T + spec.kl_coefficient * reference_divergence(spec.kl_estimator, logprobs_T, reference_T)
    if spec.entropy_coefficient:
        assert entropy_T is not None, "an entropy bonus needs the entropies"
        loss_T = loss_T - spec.entropy_coefficient * entropy_T
    return loss_T
