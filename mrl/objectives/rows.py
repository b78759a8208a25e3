"""Sums and means over the tokens of each row, given back to every token of the row. They carry no gradient.

Rows need not lie together. The same serves for any other numbering of tokens, as by spans.

Shapes: T tokens of R rows; buffers have T places, since R <= T, so that no row has to be counted on the host.
"""

import torch
from torch import Tensor


@torch.no_grad()
def row_sum(values_T: Tensor, row_T: Tensor) -> Tensor:
    """Sum over the row of each token; `row_T` numbers rows below T. Returns [T]."""
    return torch.zeros_like(values_T).index_add(0, row_T, values_T)[row_T]


def row_mean(values_T: Tensor, row_T: Tensor) -> Tensor:
    """Mean over the row of each token. Returns [T]."""
    return row_sum(values_T, row_T) / row_sum(torch.ones_like(values_T), row_T)
