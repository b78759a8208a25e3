"""Per-token log-probs from those of spans, by rules that need no forward pass.

For receiver token j in a span of n receiver tokens, with L = the span's log-prob, b_j = bytes of j:

    bytes      L b_j / sum b    uniform where a span has no bytes
    uniform    L / n

Each keeps the span's total, and copies L exactly where n = 1. The rules that read the receiver's own log-probs belong
to the objective (`mrl.objectives.ratios`). Log-probs of rows without a trace mean nothing, since their L means nothing.

    SPREADING["bytes"](batch)               a whole batch
    SPREADING["uniform"](batch.row(3))      one row

Shapes: T receiver tokens, S spans.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from mrl.alignment.aligned_batch import AlignedBatch, AlignedTrace, Float64s
from mrl.alignment.ragged import sums_at

Spreading: TypeAlias = Callable[[AlignedBatch | AlignedTrace], Float64s]
"""Batch or row -> log-probs [T] whose sum over each span is the span's."""


def uniform(batch: AlignedBatch | AlignedTrace) -> Float64s:
    """Return [T] log-probs: equal parts of the span's."""
    return (batch.span_logprob / batch.span_receiver_tokens)[batch.span_of_token]


def by_bytes(batch: AlignedBatch | AlignedTrace) -> Float64s:
    """Return [T] log-probs: parts of the span's in proportion to bytes."""
    sizes = batch.token_bytes.astype(np.float64)
    total = sums_at(batch.span_of_token, sizes, len(batch.span_logprob))[batch.span_of_token]
    part = np.divide(sizes, total, out=np.zeros_like(sizes), where=total != 0)
    return np.where(total != 0, batch.span_logprob[batch.span_of_token] * part, uniform(batch))


SPREADING: dict[str, Spreading] = {"bytes": by_bytes, "uniform": uniform}
