"""The residual of a translation: what was lost or blurred when peers' answers became the receiver's tokens.

For a span s with peer tokens S_s and receiver tokens T_s:

    L_s = sum of peer log-probs over S_s            d_s = sum of receiver log-probs over T_s - L_s
    gap = sum_s d_s   per row; per byte it does not depend on tokenizers, per receiver token it is the log of the
                      geometric mean ratio
    ESS = (sum w)^2 / (n sum w^2),  w = exp(gap) over n rows, or exp(d_s) over n spans: 1 when all weights are equal

Kinds of spans: 1:1 one token on both sides, 1:n the receiver splits, n:1 it merges, m:n both. Shares are of receiver
tokens or of bytes. `d_s` is not 0 even for one policy (see `exact_tries`); `excess_std` takes that floor off. Rows
without a trace are counted as rows, rejected or flagged, and in nothing that compares with the peer.

Shapes: R rows, T receiver tokens of all rows, S spans of all rows.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag
from mrl.alignment.ragged import sums_at
from mrl.alignment.translate import AlignedBatch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS = ("one_to_one", "one_to_many", "many_to_one", "many_to_many")
BAND = (0.8, 1.2)
"""Span ratios outside this band are called out of band: the usual clip range."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual of a whole batch, or of all that a pair of policies exchanged so far. Shares are of translated text."""

    rows: int
    rejected: Mapping[str, int]
    """Reason -> rows."""
    flagged: Mapping[str, int]
    """Flag name -> rows, rejected ones included."""
    peer_tokens: int
    """Peer tokens in the spans of rows with a trace; the counts down to `one_to_one_bytes` are of these spans too."""
    receiver_tokens: int
    bytes: int
    spans: int
    tokens_of_kind: Mapping[str, int]
    """Receiver tokens in spans of each kind."""
    one_to_one_bytes: int
    peer_nats: float
    """Sum of the peers' log-probs, with those of dropped tokens and of rejected rows: not to be divided by `bytes`."""
    dropped_tokens: int
    dropped_nats: float
    gap_nats: float | None = None
    span_std_nats: float | None = None
    span_p95_nats: float | None = None
    outside_band: float | None = None
    sequence_ess: float | None = None
    span_ess: float | None = None

    @property
    def aligned_nats(self) -> float:
        """Sum of the peers' log-probs in spans."""
        return self.peer_nats - self.dropped_nats

    @property
    def length_ratio(self) -> float:
        """Receiver tokens per peer token."""
        return _ratio(self.receiver_tokens, self.peer_tokens)

    @property
    def one_to_one_byte_share(self) -> float:
        """Share of bytes in 1:1 spans."""
        return _ratio(self.one_to_one_bytes, self.bytes)

    def share_of(self, kind: str) -> float:
        """Share of receiver tokens in spans of one kind."""
        return _ratio(self.tokens_of_kind[kind], self.receiver_tokens)

    @property
    def gap_nats_per_byte(self) -> float | None:
        """The gap per byte, a unit that does not depend on tokenizers."""
        return None if self.gap_nats is None else _ratio(self.gap_nats, self.bytes)

    @property
    def gap_nats_per_token(self) -> float | None:
        """The gap per receiver token: log of the geometric mean of the token ratios."""
        return None if self.gap_nats is None else _ratio(self.gap_nats, self.receiver_tokens)


def excess_std_nats(span_std_nats: float, floor_std_nats: float) -> float:
    """Return the span std beyond what the two tokenizers make of equal policies, if both parts are independent.

    >>> round(excess_std_nats(0.5, 0.3), 12)
    0.4
    """
    return float(max(0.0, span_std_nats**2 - floor_std_nats**2) ** 0.5)


def span_ratios(batch: AlignedBatch, receiver_logprobs: npt.NDArray[np.floating]) -> Floats:
    """Return [S] d_s in nats, from the receiver's log-probs [T] of the batch's own tokens."""
    return sums_at(batch.span_of_token, receiver_logprobs, batch.span_row.size) - batch.span_logprob


def span_kinds(batch: AlignedBatch) -> Ints:
    """Return [S] indices into `KINDS`."""
    splits, merges = batch.span_receiver_tokens > 1, batch.span_peer_tokens > 1
    return splits + 2 * merges.astype(np.int64)


def traced_spans(batch: AlignedBatch) -> Bools:
    """Return [S] whether the peer's tokens and log-probs of a span are known."""
    is_traced: Bools = batch.is_traced[batch.span_row]
    return is_traced


def summarise(batch: AlignedBatch, receiver_logprobs: npt.NDArray[np.floating] | None = None) -> Residual:
    """Return the residual of the batch as a whole."""
    is_traced = traced_spans(batch)
    kinds, own_tokens, num_bytes = (
        values[is_traced] for values in (span_kinds(batch), batch.span_receiver_tokens, batch.span_bytes)
    )
    tokens = np.bincount(kinds, own_tokens, 4).astype(int).tolist()
    flags = {flag.name or "": int(((batch.flags & flag) != 0).sum()) for flag in Flag}
    return Residual(
        rows=batch.num_rows,
        rejected=dict(Counter(reason for reason in batch.reject_reason if reason)),
        flagged={name: rows for name, rows in flags.items() if rows},
        peer_tokens=int(batch.span_peer_tokens[is_traced].sum()),
        receiver_tokens=int(own_tokens.sum()),
        bytes=int(num_bytes.sum()),
        spans=int(is_traced.sum()),
        tokens_of_kind=dict(zip(KINDS, tokens, strict=True)),
        one_to_one_bytes=int(num_bytes[kinds == 0].sum()),
        peer_nats=float(batch.peer_logprob.sum()),
        dropped_tokens=int(batch.dropped_tokens[batch.is_traced].sum()),
        dropped_nats=float(batch.dropped_logprob.sum()),
        **_ratio_fields(batch, receiver_logprobs),
    )


def effective_share(log_weights: Floats) -> float:
    """Return the ESS of weights given as logs, as a share of their number; 0 for none. Weights may under- or overflow.

    >>> effective_share(np.array([3.0, 3.0]))
    1.0
    """
    if log_weights.size == 0:
        return 0.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / weights.size)


def _ratio_fields(batch: AlignedBatch, receiver_logprobs: npt.NDArray[np.floating] | None) -> dict[str, float]:
    is_traced = traced_spans(batch)
    if receiver_logprobs is None or not is_traced.any():
        return {}
    ratios, rows = span_ratios(batch, receiver_logprobs)[is_traced], batch.span_row[is_traced]
    gaps = sums_at(rows, ratios, batch.num_rows)[np.unique(rows)]
    return {
        "gap_nats": float(gaps.sum()),
        "span_std_nats": float(ratios.std()),
        "span_p95_nats": float(np.quantile(np.abs(ratios), 0.95)),
        "outside_band": _outside(ratios),
        "sequence_ess": effective_share(gaps),
        "span_ess": effective_share(ratios),
    }


def _outside(ratios: Floats) -> float:
    return float(((ratios < np.log(BAND[0])) | (ratios > np.log(BAND[1]))).mean())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
