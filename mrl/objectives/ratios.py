"""Probability ratios of tokens and of rows, their exponents held in bounds against overflow.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.rows import row_mean

MAX_LOG_RATIO_NATS = 20.0
MAX_LOG_SEQUENCE_RATIO_NATS = 10.0


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """exp with its argument held in [-20, 20], as in verl; no gradient outside. Returns [T]."""
    return torch.exp(log_ratio_T.clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))


def bounded_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """exp(logp - logq), the exponent held in [-20, 20]; gradient through `logprobs_T` only. Returns [T]."""
    return bounded_exp(logprobs_T - base_logprobs_T.detach())


def sequence_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor, row_T: Tensor) -> Tensor:
    """Length-normalised ratio of each token's row, with a gradient of its own at every token.

        s = exp( 1/|y| sum_t (log pi_theta(y_t) - log q(y_t)) ),   s_t = exp( sg[log s] + log pi_theta(y_t) - sg[...] )

    GSPO's token form (arXiv 2507.18071): all tokens of a row have the value s, and the mean of a function of
    s_t over them has the gradient of that function of s. log s is held below 10, as in verl. Returns [T].
    """
    log_ratio_T = row_mean(logprobs_T.detach() - base_logprobs_T.detach(), row_T)
    return torch.exp((log_ratio_T + (logprobs_T - logprobs_T.detach())).clamp(max=MAX_LOG_SEQUENCE_RATIO_NATS))
