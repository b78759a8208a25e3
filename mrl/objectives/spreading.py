"""A peer's log-prob of a span of several own tokens, read token by token, for terms that form ratios of tokens.

Shapes: T tokens.
"""

from typing import assert_never

import torch
from torch import Tensor

from mrl.objectives.rows import row_sum
from mrl.objectives.specs import Spreading


@torch.no_grad()
def spread(
    span_logprobs_T: Tensor, own_logprobs_T: Tensor, span_T: Tensor, rule: Spreading = "receiver_multiplicative"
) -> Tensor:
    """Log-probs of tokens, from those of their spans and the policy's own.

        receiver_multiplicative  q_t = L log pi(y_t) / L_own       never above 0
        receiver_additive        q_t = log pi(y_t) + (L - L_own) / n    may exceed 0; pi / q is the span's mean ratio
        none                     q_t = log pi(y_t) + (L - L_own)        nothing is divided; pi / q is the span's ratio

    `span_logprobs_T` holds L at each of the span's n tokens, `span_T` numbers spans below T, and L_own sums the own
    log-probs over the span. Where L_own is not finite, or is the multiplicative rule's divisor and 0, q_t = L / n. A
    span of one token keeps its value to the bit, and NaN stays NaN. No gradient flows. Returns [T].

    The first two are rules of `mrl.alignment.spreading` and keep a span's total, so any sum over a row is the peer's.
    `none` keeps its ratio instead: a cut inside a span is the receiver's alone, the peer gave no number to it, and what
    can be known is exp(L_own - L), which then stands at every token, a gradient at each. It serves terms by token only,
    since a sum over a row would count a span n times.
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
    """Own log-probs, each moved by what the span lacks over `parts_T`; L / n where that is no number, L where n = 1."""
    total_T = row_sum(own_T, span_T)
    moved_T = own_T + (span_logprobs_T - total_T) / parts_T
    return torch.where(total_T.isfinite() & (count_T > 1), moved_T, span_logprobs_T / count_T)
