"""The unique finest common spans of two segmentations of the same bytes, for whole batches at once.

    B_p, B_r = where peer and receiver tokens end;   spans = maximal pieces between consecutive points of B_p & B_r

A boundary is in the partition iff both sides have it, so no finer common partition exists and there is only one. Rows
lie one after the other on one line of bytes, which every row's end cuts. Only a token with bytes closes a span; a token
without bytes rides with the span that follows it in its row, or with the last one. An EOS on both sides is one virtual
byte on both sides: the caller gives it length 1.

Shapes: R rows, P peer tokens, T receiver tokens, S spans. Cost: linear in tokens and bytes, no loop over either.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Span of every token, numbered over the batch and never falling within a side."""

    of_peer: Int32s
    """[P] span of every peer token."""
    of_receiver: Int32s
    """[T] span of every receiver token."""
    row_starts: Int64s
    """[R + 1] the first span of every row."""

    @property
    def num_spans(self) -> int:
        """S, the number of spans."""
        return int(self.row_starts[-1])


def align_batch(
    peer_lengths: Int32s, peer_offsets: Int64s, receiver_lengths: Int32s, receiver_offsets: Int64s
) -> Spans:
    """Return the spans from the byte lengths of both sides; `*_offsets` [R + 1] say where each row's tokens start.

    Raises ValueError when the sides of a row differ in bytes, or a row has tokens and no bytes.
    """
    peer_ends, receiver_ends = _ends(peer_lengths), _ends(receiver_lengths)
    row_ends = peer_ends[peer_offsets]
    if not np.array_equal(row_ends, receiver_ends[receiver_offsets]):
        raise ValueError("the two sides of a row have different bytes")
    has_no_bytes = row_ends[1:] == row_ends[:-1]
    if has_no_bytes.any() and (
        np.diff(peer_offsets)[has_no_bytes].any() or np.diff(receiver_offsets)[has_no_bytes].any()
    ):
        raise ValueError("a row with tokens has no bytes")
    is_peer_end = np.zeros(int(row_ends[-1]) + 1, dtype=bool)
    is_peer_end[peer_ends[1:]] = True
    is_common_end = np.zeros_like(is_peer_end)
    shared = receiver_ends[1:][is_peer_end[receiver_ends[1:]]]
    is_common_end[shared] = True
    of_peer, peer_starts = _number(is_common_end, peer_ends[1:], peer_lengths, peer_offsets)
    of_receiver, _ = _number(is_common_end, receiver_ends[1:], receiver_lengths, receiver_offsets)
    return Spans(of_peer, of_receiver, peer_starts)


def _ends(lengths: Int32s) -> Int64s:
    """Return [n + 1] positions where tokens end on the line of bytes, a zero in front."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _number(is_common_end: Bools, ends: Int64s, lengths: Int32s, offsets: Int64s) -> tuple[Int32s, Int64s]:
    """Return the span of every token, and the first span of every row: the number of spans closed before it."""
    is_closing = is_common_end[ends]
    if len(lengths) and not lengths.all():
        is_closing &= lengths > 0
    closed = np.zeros(len(ends) + 1, dtype=np.int32)
    np.cumsum(is_closing, out=closed[1:])
    row_starts = closed[offsets].astype(np.int64)
    span_of_token = closed[:-1]
    if len(lengths) and not lengths.all():
        _keep_in_row(span_of_token, np.flatnonzero(lengths == 0), offsets, row_starts)
    return span_of_token, row_starts


def _keep_in_row(span_of_token: Int32s, silent: Int64s, offsets: Int64s, row_starts: Int64s) -> None:
    """Give tokens without bytes at a row's end, in place, to the row's last span, not to the next row's first."""
    row = np.searchsorted(offsets, silent, side="right") - 1
    span_of_token[silent] = np.minimum(span_of_token[silent], row_starts[row + 1] - 1)
