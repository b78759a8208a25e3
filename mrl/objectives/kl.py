"""Estimators of the divergence from a reference policy, on tokens that the policy in training sampled.

Shapes: T tokens.
"""

from typing import Literal, assert_never

from torch import Tensor

from mrl.objectives.ratios import MAX_LOG_RATIO_NATS, bounded_exp

MAX_K3_NATS = 10.0


def reference_divergence(
    estimator: Literal["k1", "k2", "k3"], logprobs_T: Tensor, reference_logprobs_T: Tensor
) -> Tensor:
    """Per-token estimate of KL(pi_theta || pi_ref) in nats.

        d = log pi_ref(y_t) - log pi_theta(y_t), held in [-20, 20]
        k1 = -d;   k2 = d^2 / 2;   k3 = exp(d) - d - 1, held in [-10, 10]

    J. Schulman, "Approximating KL divergence" (2020); bounds as in verl. The gradient of k1 has mean 0 at the sampling
    policy: it reports, and does not pull; those of k2 and k3 do. Gradient flows through `logprobs_T`. Returns [T].
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
