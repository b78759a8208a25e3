"""Per-token numbers from span numbers, for objectives that need them.

For receiver token j in a span of n receiver tokens, with L = the span's log-prob, L_old = the sum of the receiver's own
log-probs over the span, b_j = bytes of j:

    none                     L on the span's last token, 0 before it: to be read as sums over spans only
    receiver_additive        log pi_old(j) + (L - L_old) / n    may exceed 0; fills a trainer's old log-probs
    receiver_multiplicative  L log pi_old(j) / L_old            stays <= 0; uniform where L_old = 0
    bytes                    L b_j / sum b                      needs no forward pass; uniform where a span has no bytes
    uniform                  L / n

Each keeps the span's total, and copies L exactly where n = 1. The receiver rules come closest to the true values.
Shapes: R rows, T receiver tokens, P peer tokens, S spans.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, Float64s
from mrl.alignment.ragged import sums_at

Spreading: TypeAlias = Callable[[AlignedBatch, npt.NDArray[Any] | None], Float64s]
"""(batch, receiver log-probs [T] or None) -> log-probs [T] whose sum over each span is the span's."""


def none(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] the span's log-prob on its last token, 0 elsewhere."""
    spread = np.zeros(len(batch.token_ids), dtype=np.float64)
    spread[np.cumsum(batch.span_receiver_tokens, dtype=np.int64) - 1] = batch.span_logprob
    return spread


def uniform(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] equal parts."""
    return (batch.span_logprob / batch.span_receiver_tokens)[batch.span_of_token]


def by_bytes(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] parts in proportion to bytes."""
    return _in_proportion(batch, batch.token_bytes.astype(np.float64))


def receiver_additive(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    """[T] the receiver's log-probs, all of a span moved by the same amount. Raises ValueError without them."""
    own = _checked(batch, receiver_logprobs)
    missing = (batch.span_logprob - _span_sums(batch, own)) / batch.span_receiver_tokens
    is_alone = (batch.span_receiver_tokens == 1)[batch.span_of_token]
    return np.where(is_alone, batch.span_logprob[batch.span_of_token], own + missing[batch.span_of_token])


def receiver_multiplicative(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    """[T] the receiver's log-probs, all of a span scaled by the same factor. Raises ValueError without them."""
    return _in_proportion(batch, _checked(batch, receiver_logprobs))


SPREADING: dict[str, Spreading] = {
    "none": none,
    "receiver_additive": receiver_additive,
    "receiver_multiplicative": receiver_multiplicative,
    "bytes": by_bytes,
    "uniform": uniform,
}
DEFAULT_SPREADING = "receiver_multiplicative"


def advantages_to_receiver(batch: AlignedBatch, advantages: npt.NDArray[Any], *, per_row: bool = False) -> Float64s:
    """[T] advantages of receiver tokens, from [P] of peer tokens: the byte-weighted mean over the span's peer tokens,
    the plain mean where these have no bytes. With `per_row` from [R]: broadcast. A constant stays that constant.

    Raises ValueError for another length.
    """
    wanted = batch.num_rows if per_row else len(batch.peer_logprobs)
    if advantages.shape != (wanted,):
        raise ValueError(f"advantages have shape {advantages.shape}, wanted [{wanted}]")
    if per_row:
        return advantages.astype(np.float64)[batch.span_row[batch.span_of_token]]
    is_used = batch.peer_span_of_token >= 0
    span, weights = batch.peer_span_of_token[is_used], batch.peer_token_bytes[is_used].astype(np.float64)
    values, num_spans = advantages[is_used].astype(np.float64), len(batch.span_row)
    weights[(sums_at(span, weights, num_spans) == 0)[span]] = 1.0
    # Deviations from the span's first value, so that a constant comes out to the last bit.
    first = values[np.searchsorted(span, np.arange(num_spans))]
    deviation = sums_at(span, weights * (values - first[span]), num_spans) / sums_at(span, weights, num_spans)
    return (first + deviation)[batch.span_of_token]


def _in_proportion(batch: AlignedBatch, shares: Float64s) -> Float64s:
    """[T] the span's log-prob divided as `shares` are; uniform where they sum to 0."""
    total = _span_sums(batch, shares)
    part = np.divide(shares, total[batch.span_of_token], out=np.zeros_like(shares), where=_is_nonzero(batch, total))
    return np.where(_is_nonzero(batch, total), batch.span_logprob[batch.span_of_token] * part, uniform(batch))


def _is_nonzero(batch: AlignedBatch, total: Float64s) -> npt.NDArray[np.bool_]:
    is_nonzero: npt.NDArray[np.bool_] = (total != 0)[batch.span_of_token]
    return is_nonzero


def _span_sums(batch: AlignedBatch, values: npt.NDArray[Any]) -> Float64s:
    return sums_at(batch.span_of_token, values, len(batch.span_row))


def _checked(batch: AlignedBatch, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    if receiver_logprobs is None or receiver_logprobs.shape != batch.token_ids.shape:
        raise ValueError("this rule needs the receiver's log-probs, one per receiver token")
    return receiver_logprobs.astype(np.float64)
