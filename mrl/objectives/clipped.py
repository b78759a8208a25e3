"""The policy-gradient term of GRPO, PPO and decoupled PPO.

Shapes: T tokens.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO_NATS = 20.0


def bounded_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """exp(logp - logq), the exponent held in [-20, 20] against overflow; gradient through `logprobs_T` only."""
    log_ratio_T = logprobs_T - base_logprobs_T.detach()
    return torch.exp(log_ratio_T.clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))


def clipped_surrogate(
    logprobs_T: Tensor, proximal_logprobs_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Per-token clipped surrogate, as a loss.

        L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t),   r_t = pi_theta(y_t) / pi_prox(y_t)

    Equal clips give PPO (arXiv 1707.06347, eq. 7) and, with group-normalised advantages, GRPO (arXiv 2402.03300, eq.
    3); a larger `clip_high` is DAPO's clip-higher (arXiv 2503.14476, eq. 8). With pi_prox recomputed at the start of
    the step it is the clipped factor of decoupled PPO (arXiv 2110.00641, eq. 7).
    Gradient flows through `logprobs_T` only; it is exactly 0 where A_t = 0. Returns [T].
    """
    ratio_T = bounded_ratio(logprobs_T, proximal_logprobs_T)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    advantages_T = advantages_T.detach()
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)


def behaviour_weight(proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, *, cap: float) -> Tensor:
    """Detached importance weight that carries tokens sampled by an older version to the proximal policy.

        w_t = sg[ min(pi_prox(y_t) / pi_behaviour(y_t), cap) ]

    It multiplies the clipped term in decoupled PPO (arXiv 2110.00641, eq. 7); staying outside the clip, staleness and
    engine mismatch are not mistaken for a policy change. The cap truncates (truncated importance sampling).
    No gradient flows. Returns [T].
    """
    return bounded_ratio(proximal_logprobs_T.detach(), behaviour_logprobs_T).clamp(max=cap)
