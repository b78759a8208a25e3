"""Losses that pull to the reference policy, or reward entropy: added to a term whatever the advantages say.

Shapes: T tokens.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor

from mrl.objectives.ratios import MAX_LOG_RATIO_NATS, bounded_exp
from mrl.objectives.specs import Regularizer

MAX_K3_NATS = 10.0


def reference_divergence(
    estimator: Literal["k1", "k2", "k3"], logprobs_T: Tensor, reference_logprobs_T: Tensor
) -> Tensor:
    """Return a per-token estimate of KL(pi_theta || pi_ref) in nats.

        d = log pi_ref(y_t) - log pi_theta(y_t), held in [-20, 20]
        k1 = -d;   k2 = d^2 / 2;   k3 = exp(d) - d - 1, held in [-10, 10]

    J. Schulman, "Approximating KL divergence" (2020); bounds as in verl. The gradient of k1 has mean 0 at the sampling
    policy: k1 reports, and does not pull; k2 and k3 pull. Gradient flows through `logprobs_T`. Returns [T].
    """
    difference_T = (reference_logprobs_T.detach() - logprobs_T).clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS)
    match estimator:
        case "k1":
            return -difference_T
        case "k2":
            return difference_T.square() / 2
        case "k3":
            return (bounded_exp(difference_T) - difference_T - 1).clamp(-MAX_K3_NATS, MAX_K3_NATS)
    assert_never(estimator)


def regularizer_losses(
    spec: Regularizer, logprobs_T: Tensor, *, reference_T: Tensor | None = None, entropy_T: Tensor | None = None
) -> Tensor:
    """Return kl_coefficient * KL(pi_theta || pi_ref)_t - entropy_coefficient * H_t, in nats, [T].

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
