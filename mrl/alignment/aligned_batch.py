"""Peer answers in the receiver's tokens.

Shapes: R rows; T receiver tokens and P peer tokens of all rows one after the other; S common spans of all rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag, Reason

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float64s: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class AlignedTrace:
    """One row of a batch; span numbers count from 0 within the row. Spreading rules read it as they read a batch."""

    token_ids: Int32s
    """[T] receiver ids, EOS included where it is mapped."""
    token_bytes: Int32s
    """[T] text bytes of every receiver token; 0 for EOS."""
    span_of_token: Int32s
    """[T] span of every receiver token."""
    peer_token_bytes: Int32s
    """[P] text bytes of every peer token, as given."""
    peer_span_of_token: Int32s
    """[P] span of every peer token; -1 for dropped tokens."""
    span_logprob: Float64s
    """[S] sum of the peer's log-probs in every span, in nats."""
    span_peer_tokens: Int32s
    """[S] peer tokens of every span."""
    span_receiver_tokens: Int32s
    """[S] receiver tokens of every span."""
    span_bytes: Int32s
    """[S] text bytes of every span, as the receiver reads them."""
    flags: Flag
    reject_reason: Reason | Literal[""]
    peer_logprob: float
    dropped_logprob: float
    dropped_tokens: int

    @property
    def is_traced(self) -> bool:
        """Whether the peer's log-probs are known."""
        return not self.flags & Flag.UNTRACED


@dataclass(frozen=True, slots=True, eq=False)
class AlignedBatch:
    """R peer answers, translated.

    Rejected rows have no receiver tokens and no spans; all their peer tokens are dropped. Rows with fields that are
    wrong (the "wire" reasons) have no peer tokens either, since nothing in them can be believed.

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
    """[P] log-prob of every peer token in nats, as given."""
    peer_token_bytes: Int32s
    """[P] text bytes of every peer token, as given."""
    peer_span_of_token: Int32s
    """[P] span of every peer token; -1 for dropped tokens."""
    span_row: Int32s
    """[S] row of every span, never falling."""
    span_logprob: Float64s
    """[S] sum of the peer's log-probs in every span, in nats."""
    span_peer_tokens: Int32s
    """[S] peer tokens of every span, at least 1."""
    span_receiver_tokens: Int32s
    """[S] receiver tokens of every span, at least 1."""
    span_bytes: Int32s
    """[S] text bytes of every span, as the receiver reads them; 0 for the EOS span."""
    flags: Int32s
    """[R] `Flag` bits."""
    reject_reason: tuple[Reason | Literal[""], ...]
    """[R] why the row was rejected; "" where it was translated."""
    dropped_logprob: Float64s
    """[R] sum of the log-probs of dropped peer tokens, in nats."""
    dropped_tokens: Int64s
    """[R] peer tokens without a span."""
    peer_logprob: Float64s
    """[R] sum of the log-probs of all peer tokens, in nats; 0 for a row whose fields are wrong."""

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.reject_reason)

    @property
    def is_traced(self) -> Bools:
        """[R] whether the peer's log-probs are known."""
        is_traced: Bools = (self.flags & Flag.UNTRACED) == 0
        return is_traced

    @property
    def cut_bytes(self) -> Int64s:
        """[R] bytes of the peer's text, as given, that are in no span: of its cut end, or of the whole row."""
        is_cut = self.peer_span_of_token < 0
        row = np.repeat(np.arange(self.num_rows), np.diff(self.peer_offsets))[is_cut]
        return np.bincount(row, self.peer_token_bytes[is_cut], self.num_rows).astype(np.int64)

    @property
    def is_exact(self) -> Bools:
        """[R] whether the own text is the peer's, byte for byte: not rejected, not put into NFC, nothing cut off."""
        is_exact: Bools = ((self.flags & (Flag.REJECT | Flag.NORM)) == 0) & (self.cut_bytes == 0)
        return is_exact

    def row(self, index: int) -> AlignedTrace:
        """Return one row with its own span numbers."""
        tokens = slice(self.row_offsets[index], self.row_offsets[index + 1])
        peer = slice(self.peer_offsets[index], self.peer_offsets[index + 1])
        first, end = np.searchsorted(self.span_row, [index, index + 1]).tolist()
        spans, peer_spans = slice(first, end), self.peer_span_of_token[peer]
        return AlignedTrace(
            token_ids=self.token_ids[tokens],
            token_bytes=self.token_bytes[tokens],
            span_of_token=self.span_of_token[tokens] - np.int32(first),
            peer_token_bytes=self.peer_token_bytes[peer],
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


POSITIONS = {
    "row_offsets": "token_ids",
    "peer_offsets": "peer_logprobs",
    "span_of_token": "span_row",
    "peer_span_of_token": "span_row",
    "span_row": "flags",
}
"""Fields that hold positions -> a field with one entry for each of them; -1 is no position."""
OFFSETS = ("row_offsets", "peer_offsets")
"""Fields with one entry more than rows: of every part but the first, the leading 0 goes."""
ROOM = 1.125
"""Room of an array, as a multiple of the size that the first part lets expect."""


class GrowingArray:
    """An array that is written end to end. Room beyond its end costs nothing: a page not written to is not there."""

    def __init__(self, first: npt.NDArray[Any], num_parts: int) -> None:
        self._room = np.empty(int(len(first) * num_parts * ROOM), dtype=first.dtype)
        self._size = 0

    def append(self, values: npt.NDArray[Any], shift: int) -> None:
        """Write `values` at the end; values that are not negative are raised by `shift`."""
        start, end = self._size, self._size + len(values)
        if end > len(self._room):
            wider = np.empty(max(end, int(end * ROOM)), dtype=self._room.dtype)
            wider[:start] = self._room[:start]
            self._room = wider
        part = self._room[start:end]
        part[:] = values
        if shift:
            np.add(part, shift, out=part, where=part >= 0)
        self._size = end

    def written(self) -> npt.NDArray[Any]:
        """Return all that was appended."""
        return self._room[: self._size]


def merge(parts: Iterable[AlignedBatch], num_parts: int) -> AlignedBatch:
    """Join batches one after the other; spans are numbered on. `num_parts` is the number of parts to come.

    Parts are copied as they come, so that parts which nobody else holds need no memory beside the result.
    """
    remaining = iter(parts)
    first = next(remaining)
    if num_parts == 1:
        return first
    names = [field.name for field in fields(AlignedBatch) if field.name != "reject_reason"]
    columns = {name: GrowingArray(getattr(first, name), num_parts) for name in names}
    before = dict.fromkeys(POSITIONS.values(), 0)
    reasons: list[Reason | Literal[""]] = []
    for place, part in enumerate(chain([first], remaining)):
        for name, column in columns.items():
            values = getattr(part, name)[1 if place and name in OFFSETS else 0 :]
            column.append(values, before[POSITIONS[name]] if name in POSITIONS else 0)
        for name in before:
            before[name] += len(getattr(part, name))
        reasons += part.reject_reason
    return AlignedBatch(reject_reason=tuple(reasons), **{name: column.written() for name, column in columns.items()})
