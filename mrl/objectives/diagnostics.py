"""Numbers to look at while training. None carries gradient; all are per token, so that the caller can sum over ranks.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.clipped import bounded_ratio


@torch.no_grad()
def k3_nats(logprobs_T: Tensor, sampled_logprobs_T: Tensor) -> Tensor:
    """Per-token estimate of KL(sampler || policy) on tokens that the sampler drew; never negative.

        k3_t = exp(d_t) - d_t - 1,   d_t = log pi(y_t) - log q(y_t)

    Its mean over tokens drawn from q is unbiased (J. Schulman, "Approximating KL divergence", 2020). Returns [T].
    """
    difference_T = logprobs_T - sampled_logprobs_T
    return bounded_ratio(logprobs_T, sampled_logprobs_T) - difference_T - 1


@torch.no_grad()
def clipped_tokens(
    logprobs_T: Tensor, proximal_logprobs_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Tokens that the clip takes out of the gradient: ratio above 1 + high with A > 0, or below 1 - low with A < 0.

    Returns [T] bool.
    """
    ratio_T = bounded_ratio(logprobs_T, proximal_logprobs_T)
    above_T = (ratio_T > 1 + clip_high) & (advantages_T > 0)
    below_T = (ratio_T < 1 - clip_low) & (advantages_T < 0)
    return above_T | below_T


@torch.no_grad()
def sampled_entropy_nats(logprobs_T: Tensor) -> Tensor:
    """Surprisal of the sampled tokens; its mean over a policy's own samples estimates the entropy. Returns [T]."""
    return -logprobs_T


@torch.no_grad()
def ratios(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """pi / q of each token, for the largest mismatch of a batch. Returns [T]."""
    return bounded_ratio(logprobs_T, base_logprobs_T)
