"""A peer's log-prob of a span of several own tokens, divided over them, for terms that form ratios of tokens.

Shapes: T tokens.
"""

import torch
from torch import Tensor

from mrl.objectives.rows import row_sum


@torch.no_grad()
def spread(span_logprobs_T: Tensor, own_logprobs_T: Tensor, span_T: Tensor) -> Tensor:
    """Log-probs of tokens, from those of their spans, in proportion to the policy's own.

        q_t = L log pi(y_t) / sum over the span of log pi(y_u);   L / n where that sum is 0 or not finite

    `span_logprobs_T` holds L at each of the span's n tokens, `span_T` numbers spans below T. Every span keeps its
    total, nothing exceeds 0, a span of one token keeps its value to the bit, and NaN stays NaN. It is the rule
    `receiver_multiplicative` of `mrl.alignment.spreading`. No gradient flows. Returns [T].
    """
    own_T = own_logprobs_T.clamp(max=0.0)
    total_T, count_T = row_sum(own_T, span_T), row_sum(torch.ones_like(own_T), span_T)
    usable_T = total_T.isfinite() & (total_T != 0)
    part_T = torch.where(usable_T, own_T / total_T, 1 / count_T)
    return span_logprobs_T * part_T
