"""What peer answers became in the receiver's tokens.

Shapes: R rows; T receiver tokens and P peer tokens of all rows one after the other; S common spans of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float64s: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class AlignedTrace:
    """One row of a batch; span numbers count from 0 within the row."""

    token_ids: Int32s
    """[T] receiver ids, EOS included where it is mapped."""
    span_of_token: Int32s
    """[T]"""
    peer_span_of_token: Int32s
    """[P] -1 for dropped tokens."""
    span_logprob: Float64s
    """[S]"""
    span_peer_tokens: Int32s
    """[S]"""
    span_receiver_tokens: Int32s
    """[S]"""
    span_bytes: Int32s
    """[S]"""
    flags: Flag
    reject_reason: str
    peer_logprob: float
    dropped_logprob: float
    dropped_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class AlignedBatch:
    """What R peer answers became.

    Rejected rows have no receiver tokens and no spans; all their peer tokens are dropped. Rows whose fields lie (the
    "wire" reasons) have no peer tokens either, since nothing in them can be believed.

    For every row: peer_logprob = sum of its span_logprob + dropped_logprob.
    """

    token_ids: Int32s
    """[T] receiver ids of all rows, EOS included where it is mapped."""
    row_offsets: Int64s
    """[R + 1] where each row's receiver tokens start."""
    token_bytes: Int32s
    """[T] text bytes of every receiver token; 0 for EOS."""
    span_of_token: Int32s
    """[T] span of every receiver token, numbered over the batch, never falling."""
    peer_offsets: Int64s
    """[R + 1] where each row's peer tokens start."""
    peer_logprobs: npt.NDArray[np.float32]
    """[P] as given."""
    peer_token_bytes: Int32s
    """[P] as given."""
    peer_span_of_token: Int32s
    """[P] span of every peer token; -1 for dropped ones."""
    span_row: Int32s
    """[S] row of every span, never falling."""
    span_logprob: Float64s
    """[S] sum of the peer's log-probs."""
    span_peer_tokens: Int32s
    """[S] at least 1."""
    span_receiver_tokens: Int32s
    """[S] at least 1."""
    span_bytes: Int32s
    """[S] text bytes as the receiver reads them; 0 for the EOS span."""
    flags: Int32s
    """[R] `Flag` bits."""
    reject_reason: tuple[str, ...]
    """[R] "" where the row was translated."""
    dropped_logprob: Float64s
    """[R]"""
    dropped_tokens: Int64s
    """[R] peer tokens without a span."""
    peer_logprob: Float64s
    """[R] sum over all peer tokens; 0 for a row whose fields lie."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.reject_reason)

    def row(self, index: int) -> AlignedTrace:
        """One row with its own span numbers."""
        tokens = slice(self.row_offsets[index], self.row_offsets[index + 1])
        peer = slice(self.peer_offsets[index], self.peer_offsets[index + 1])
        first, end = np.searchsorted(self.span_row, [index, index + 1]).tolist()
        spans, peer_spans = slice(first, end), self.peer_span_of_token[peer]
        return AlignedTrace(
            token_ids=self.token_ids[tokens],
            span_of_token=self.span_of_token[tokens] - np.int32(first),
            peer_span_of_token=np.where(peer_spans < 0, peer_spans, peer_spans - np.int32(first)),
            span_logprob=self.span_logprob[spans],
            span_peer_tokens=self.span_peer_tokens[spans],
            span_receiver_tokens=self.span_receiver_tokens[spans],
            span_bytes=self.span_bytes[spans],
            flags=Flag(int(self.flags[index])),
            reject_reason=self.reject_reason[index],
            peer_logprob=float(self.peer_logprob[index]),
            dropped_logprob=float(self.dropped_logprob[index]),
            dropped_tokens=int(self.dropped_tokens[index]),
        )


PLAIN = (
    *("token_ids", "token_bytes", "peer_logprobs", "peer_token_bytes", "span_logprob", "span_peer_tokens"),
    *("span_receiver_tokens", "span_bytes", "flags", "dropped_logprob", "dropped_tokens", "peer_logprob"),
)
"""Fields that hold no positions: joined as they are."""


def merge(parts: Sequence[AlignedBatch]) -> AlignedBatch:
    """Batches one after the other as one; spans are numbered on."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    def shifted(name: str, shifts: list[int], skip: int = 0) -> npt.NDArray[Any]:
        arrays = [getattr(part, name)[skip if place else 0 :] for place, part in enumerate(parts)]
        whole = np.concatenate(arrays)
        for part, shift in zip(np.split(whole, np.cumsum([len(array) for array in arrays[:-1]])), shifts, strict=True):
            np.add(part, shift, out=part, where=part >= 0)
        return whole

    rows = _starts([part.num_rows for part in parts])
    spans = _starts([len(part.span_row) for part in parts])
    tokens = _starts([len(part.token_ids) for part in parts])
    peer_tokens = _starts([len(part.peer_logprobs) for part in parts])
    return AlignedBatch(
        row_offsets=shifted("row_offsets", tokens, skip=1),
        peer_offsets=shifted("peer_offsets", peer_tokens, skip=1),
        span_of_token=shifted("span_of_token", spans),
        peer_span_of_token=shifted("peer_span_of_token", spans),
        span_row=shifted("span_row", rows),
        reject_reason=tuple(chain.from_iterable(part.reject_reason for part in parts)),
        **{name: joined(name) for name in PLAIN},
    )


def _starts(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
