"""Per-token numbers from span numbers, for objectives that need them.

For receiver token j in a span of n receiver tokens, with L = the span's log-prob, L_old = the sum of the receiver's own
log-probs over the span, b_j = bytes of j:

    none                     L on the span's last token, 0 before it: to be read as sums over spans only
    receiver_additive        log pi_old(j) + (L - L_old) / n    may exceed 0; fills a trainer's old log-probs
    receiver_multiplicative  L log pi_old(j) / L_old            stays <= 0; uniform where L_old = 0
    bytes                    L b_j / sum b                      needs no forward pass; uniform where a span has no bytes
    uniform                  L / n

Each keeps the span's total, and copies L exactly where n = 1. The receiver rules come closest to the true values. They
are uniform where L_old is not finite, and the multiplicative one reads own log-probs above 0 (rounding) as 0. What they
give for rows without a trace means nothing, since L does not.

    SPREADING["bytes"](batch, None)                      whole batches
    SPREADING["receiver_additive"](batch.row(3), own)    one row, with the receiver's log-probs of that row

Shapes: R rows, T receiver tokens, P peer tokens, S spans.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, Float64s, Int32s
from mrl.alignment.ragged import sums_at


class Spanned(Protocol):
    """What the rules read, of a whole batch or of one row."""

    @property
    def token_bytes(self) -> Int32s:
        """[T] text bytes."""

    @property
    def span_of_token(self) -> Int32s:
        """[T]"""

    @property
    def span_logprob(self) -> Float64s:
        """[S] of the peer."""

    @property
    def span_receiver_tokens(self) -> Int32s:
        """[S] at least 1."""


Spreading: TypeAlias = Callable[[Spanned, npt.NDArray[Any] | None], Float64s]
"""(batch or row, receiver log-probs [T] or None) -> log-probs [T] whose sum over each span is the span's."""


def none(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] the span's log-prob on its last token, 0 elsewhere."""
    spread = np.zeros(len(batch.span_of_token), dtype=np.float64)
    spread[np.cumsum(batch.span_receiver_tokens, dtype=np.int64) - 1] = batch.span_logprob
    return spread


def uniform(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] equal parts."""
    return (batch.span_logprob / batch.span_receiver_tokens)[batch.span_of_token]


def by_bytes(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None = None) -> Float64s:
    """[T] parts in proportion to bytes."""
    return _in_proportion(batch, batch.token_bytes.astype(np.float64))


def receiver_additive(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    """[T] the receiver's log-probs, all of a span moved by the same amount. Raises ValueError without them."""
    own = _checked(batch, receiver_logprobs)
    is_usable = np.isfinite(_span_sums(batch, own))[batch.span_of_token]
    own = np.where(is_usable, own, 0.0)
    missing = (batch.span_logprob - _span_sums(batch, own)) / batch.span_receiver_tokens
    is_alone = (batch.span_receiver_tokens == 1)[batch.span_of_token]
    return np.where(is_alone, batch.span_logprob[batch.span_of_token], own + missing[batch.span_of_token])


def receiver_multiplicative(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    """[T] the receiver's log-probs, all of a span scaled by the same factor. Raises ValueError without them."""
    return _in_proportion(batch, np.minimum(_checked(batch, receiver_logprobs), 0.0))


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


def _in_proportion(batch: Spanned, shares: Float64s) -> Float64s:
    """[T] the span's log-prob divided as `shares`, all of one sign, are; uniform where they have no finite sum or 0."""
    total = _span_sums(batch, shares)
    is_usable = (np.isfinite(total) & (total != 0))[batch.span_of_token]
    part = np.divide(shares, total[batch.span_of_token], out=np.zeros_like(shares), where=is_usable)
    return np.where(is_usable, batch.span_logprob[batch.span_of_token] * part, uniform(batch))


def _span_sums(batch: Spanned, values: npt.NDArray[Any]) -> Float64s:
    return sums_at(batch.span_of_token, values, len(batch.span_logprob))


def _checked(batch: Spanned, receiver_logprobs: npt.NDArray[Any] | None) -> Float64s:
    if receiver_logprobs is None or receiver_logprobs.shape != batch.span_of_token.shape:
        raise ValueError("this rule needs the receiver's log-probs, one per receiver token")
    return receiver_logprobs.astype(np.float64)
