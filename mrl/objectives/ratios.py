"""Ratios of probabilities, by token and by row, and the detached weights that are made of them.

Sums and means over rows are given back to every token of the row. Exponents are held in bounds against overflow.

Shapes: T tokens of R rows; buffers have T places, since R <= T, so that no row has to be counted on the host.
"""

from typing import assert_never

import torch
from torch import Tensor

from mrl.objectives.specs import Correction, Spreading

MAX_LOG_RATIO_NATS = 20.0
MAX_LOG_SEQUENCE_RATIO_NATS = 10.0


@torch.no_grad()
def row_sum(values_T: Tensor, row_T: Tensor) -> Tensor:
    """Return [T] sums over the row of each token; `row_T` numbers rows below T."""
    return torch.zeros_like(values_T).index_add(0, row_T, values_T)[row_T]


def row_mean(values_T: Tensor, row_T: Tensor) -> Tensor:
    """Return [T] means over the row of each token."""
    return row_sum(values_T, row_T) / row_sum(torch.ones_like(values_T), row_T)


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Return [T] exp with its argument held in [-20, 20], as in verl; no gradient outside."""
    return torch.exp(log_ratio_T.clamp(-MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))


def bounded_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """Return [T] exp(logp - logq), the exponent held in [-20, 20]; gradient through `logprobs_T` only."""
    return bounded_exp(logprobs_T - base_logprobs_T.detach())


def sequence_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor, row_T: Tensor) -> Tensor:
    """Return the length-normalised ratio of each token's row, with a gradient of its own at every token.

        s = exp( 1/|y| sum_t (log pi_theta(y_t) - log q(y_t)) ),   s_t = exp( sg[log s] + log pi_theta(y_t) - sg[...] )

    GSPO's token form (arXiv 2507.18071): all tokens of a row have the value s, and the mean of a function of
    s_t over them has the gradient of that function of s. log s is held below 10, as in verl. Returns [T].
    """
    log_ratio_T = row_mean(logprobs_T.detach() - base_logprobs_T.detach(), row_T)
    return torch.exp((log_ratio_T + (logprobs_T - logprobs_T.detach())).clamp(max=MAX_LOG_SEQUENCE_RATIO_NATS))


@torch.no_grad()
def correction_weight(
    spec: Correction, proximal_logprobs_T: Tensor, behaviour_logprobs_T: Tensor, row_T: Tensor
) -> Tensor:
    """Return the factor of each token's term, from k = pi_prox / pi_behaviour of the token or of its row.

        level    token k_t;  sequence prod_t k_t;  geometric (prod_t k_t)^(1/|y|)
        truncate max(lower, min(k, upper));  mask k 1[lower <= k <= upper];  gate 1[lower <= k <= upper]

    Token and truncate is the behaviour weight of decoupled PPO (arXiv 2110.00641, eq. 7) under a cap, and truncated
    importance sampling; mask is IcePop; gate over rows is sequence masking. The weight is outside the clip, so that
    staleness and engine mismatch are not mistaken for a policy change. log k is held in [-20, 20]. No gradient flows.
    Returns [T].
    """
    ratio_T = bounded_exp(_log_ratio(spec, proximal_logprobs_T - behaviour_logprobs_T, row_T))
    inside_T = (ratio_T >= spec.lower) & (ratio_T <= spec.upper)
    match spec.action:
        case "truncate":
            return ratio_T.clamp(spec.lower, spec.upper)
        case "mask":
            return torch.where(inside_T, ratio_T, 0.0)
        case "gate":
            return inside_T.to(ratio_T.dtype)
    assert_never(spec.action)


def _log_ratio(spec: Correction, log_ratio_T: Tensor, row_T: Tensor) -> Tensor:
    match spec.level:
        case "token":
            return log_ratio_T
        case "sequence":
            return row_sum(log_ratio_T, row_T)
        case "geometric":
            return row_mean(log_ratio_T, row_T)
    assert_never(spec.level)


@torch.no_grad()
def spread(
    span_logprobs_T: Tensor, own_logprobs_T: Tensor, span_T: Tensor, rule: Spreading = "receiver_multiplicative"
) -> Tensor:
    """Return log-probs of tokens, from those of their spans and the policy's own.

        receiver_multiplicative  q_t = L log pi(y_t) / L_own       never above 0
        receiver_additive        q_t = log pi(y_t) + (L - L_own) / n    may exceed 0; pi / q is the span's mean ratio
        none                     q_t = log pi(y_t) + (L - L_own)        nothing is divided; pi / q is the span's ratio

    `span_logprobs_T` holds L at each of the span's n tokens, `span_T` numbers spans below T, and L_own sums the own
    log-probs over the span. Where L_own is not finite, or is the multiplicative rule's divisor and 0, q_t = L / n. A
    span of one token keeps its value to the bit, and NaN stays NaN. No gradient flows. Returns [T].

    The first two keep a span's total, so any sum over a row is the peer's.
    `none` keeps the span's ratio instead: a cut inside a span is the receiver's alone, and the peer gave no number to
    it. Only exp(L_own - L) is known, which then stands at every token, a gradient at each. It serves terms by token
    only, since a sum over a row would count a span n times.
    """
    count_T = row_sum(torch.ones_like(own_logprobs_T), span_T)
    match rule:
        case "receiver_multiplicative":
            return _scaled(span_logprobs_T, own_logprobs_T.clamp(max=0.0), span_T, count_T)
        case "receiver_additive":
            return _moved(span_logprobs_T, own_logprobs_T, span_T, count_T, parts_T=count_T)
        case "none":
            return _moved(span_logprobs_T, own_logprobs_T, span_T, count_T, parts_T=torch.ones_like(count_T))
    assert_never(rule)


def _scaled(span_logprobs_T: Tensor, own_T: Tensor, span_T: Tensor, count_T: Tensor) -> Tensor:
    total_T = row_sum(own_T, span_T)
    usable_T = total_T.isfinite() & (total_T != 0)
    return span_logprobs_T * torch.where(usable_T, own_T / total_T, 1 / count_T)


def _moved(span_logprobs_T: Tensor, own_T: Tensor, span_T: Tensor, count_T: Tensor, parts_T: Tensor) -> Tensor:
    """Return own log-probs, each moved by (L - L_own) / `parts_T`; L / n where L_own is not finite, L where n = 1."""
    total_T = row_sum(own_T, span_T)
    moved_T = own_T + (span_logprobs_T - total_T) / parts_T
    return torch.where(total_T.isfinite() & (count_T > 1), moved_T, span_logprobs_T / count_T)
