"""Selections from an aligned batch: some of its rows, the first tokens of each, or several rows joined to one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.flags import Reason
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.ragged import offsets_of, sums_at


def select_rows(batch: AlignedBatch, rows: Sequence[int]) -> AlignedBatch:
    """Return the batch of these rows, which must be ascending; spans and rows are numbered anew."""
    wanted = np.asarray(rows, dtype=np.int64)
    is_wanted = np.zeros(batch.num_rows, dtype=bool)
    is_wanted[wanted] = True
    tokens = np.repeat(is_wanted, np.diff(batch.row_offsets))
    peer_tokens = np.repeat(is_wanted, np.diff(batch.peer_offsets))
    spans = is_wanted[batch.span_row]
    new_span = np.cumsum(spans, dtype=np.int32) - np.int32(1)
    new_row = np.cumsum(is_wanted, dtype=np.int32) - np.int32(1)
    peer_span = batch.peer_span_of_token[peer_tokens]
    return AlignedBatch(
        token_ids=batch.token_ids[tokens],
        row_offsets=offsets_of(np.diff(batch.row_offsets)[wanted]),
        token_bytes=batch.token_bytes[tokens],
        span_of_token=new_span[batch.span_of_token[tokens]],
        peer_offsets=offsets_of(np.diff(batch.peer_offsets)[wanted]),
        peer_logprobs=batch.peer_logprobs[peer_tokens],
        peer_token_bytes=batch.peer_token_bytes[peer_tokens],
        peer_span_of_token=np.where(peer_span < 0, peer_span, new_span[peer_span]).astype(np.int32),
        span_row=new_row[batch.span_row[spans]],
        span_logprob=batch.span_logprob[spans],
        span_peer_tokens=batch.span_peer_tokens[spans],
        span_receiver_tokens=batch.span_receiver_tokens[spans],
        span_bytes=batch.span_bytes[spans],
        flags=batch.flags[wanted],
        reject_reason=tuple(batch.reject_reason[row] for row in rows),
        dropped_logprob=batch.dropped_logprob[wanted],
        dropped_tokens=batch.dropped_tokens[wanted],
        peer_logprob=batch.peer_logprob[wanted],
    )


SPAN_COLUMNS = ("span_row", "span_logprob", "span_peer_tokens", "span_receiver_tokens", "span_bytes")


def first_tokens(batch: AlignedBatch, counts: Sequence[int]) -> AlignedBatch:
    """Return the batch of the first `counts[r]` own tokens of every row; peer tokens beyond them are booked as dropped.

    Raises ValueError when a row would be cut inside a span.
    """
    held = np.diff(batch.row_offsets)
    kept = np.minimum(np.asarray(counts, dtype=np.int64), held)
    place = np.arange(len(batch.token_ids)) - np.repeat(batch.row_offsets[:-1], held)
    tokens = place < np.repeat(kept, held)
    found = np.bincount(batch.span_of_token[tokens], minlength=len(batch.span_row))
    spans = found == batch.span_receiver_tokens
    if (found[~spans] > 0).any():
        raise ValueError("a row is cut inside a span")
    number = np.where(spans, np.cumsum(spans) - 1, -1).astype(np.int32)
    peer_span = batch.peer_span_of_token.copy()
    peer_span[peer_span >= 0] = number[peer_span[peer_span >= 0]]
    dropped = np.repeat(np.arange(batch.num_rows), np.diff(batch.peer_offsets))[peer_span < 0]
    lost = batch.peer_logprobs[peer_span < 0].astype(np.float64)
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        token_bytes=batch.token_bytes[tokens],
        row_offsets=offsets_of(kept),
        span_of_token=number[batch.span_of_token[tokens]],
        peer_span_of_token=peer_span,
        dropped_logprob=sums_at(dropped, lost, batch.num_rows),
        dropped_tokens=np.bincount(dropped, minlength=batch.num_rows).astype(np.int64),
        **{name: getattr(batch, name)[spans] for name in SPAN_COLUMNS},
    )


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of a joined row."""

    row: int | None
    """Row of the batch that makes the part; None where nothing of it has own tokens."""
    unsaid: PeerAnswer | None = None
    """Peer tokens after that row which have no counterpart here: they are booked as dropped."""


def join_rows(batch: AlignedBatch, parts: Sequence[Sequence[RowPart]]) -> AlignedBatch:
    """Return the batch in which each row is made of its parts, end to end; no span crosses from one part into the next.

    Rows of `batch` appear once, ascending. A row with a rejected part is rejected for the reason of its first rejected
    part, and all of its peer tokens are dropped; its flags are those of all its parts.
    """
    rejected: list[Reason | Literal[""]] = [next(iter(_reasons(batch, of_row)), "") for of_row in parts]
    flat, place = [part for of_row in parts for part in of_row], [n for n, of_row in enumerate(parts) for _ in of_row]
    new_row = np.zeros(batch.num_rows, dtype=np.int32)
    new_row[[part.row for part in flat if part.row is not None]] = [
        n for n, part in zip(place, flat, strict=True) if part.row is not None
    ]
    is_used = np.array([not reason for reason in rejected], dtype=bool)[new_row]
    tokens, spans = np.repeat(is_used, np.diff(batch.row_offsets)), is_used[batch.span_row]
    number = np.where(spans, np.cumsum(spans) - 1, -1).astype(np.int32)
    span_row, span_of_token = new_row[batch.span_row[spans]], number[batch.span_of_token[tokens]]
    peer = [_peer_tokens(batch, part, number) for part in flat]
    peer_span, peer_logprobs, peer_bytes = (np.concatenate(columns) for columns in zip(_NO_TOKENS, *peer, strict=True))
    row_of_peer = np.repeat(place, [len(of_part[0]) for of_part in peer]).astype(np.int64)
    told, is_dropped = peer_logprobs.astype(np.float64), peer_span < 0
    return AlignedBatch(
        token_ids=batch.token_ids[tokens],
        row_offsets=offsets_of(np.bincount(span_row[span_of_token], minlength=len(parts))),
        token_bytes=batch.token_bytes[tokens],
        span_of_token=span_of_token,
        peer_offsets=offsets_of(np.bincount(row_of_peer, minlength=len(parts))),
        peer_logprobs=peer_logprobs,
        peer_token_bytes=peer_bytes,
        peer_span_of_token=peer_span,
        flags=np.array([_joined_flags(batch, of_row) for of_row in parts], dtype=np.int32),
        reject_reason=tuple(rejected),
        dropped_logprob=sums_at(row_of_peer[is_dropped], told[is_dropped], len(parts)),
        dropped_tokens=np.bincount(row_of_peer[is_dropped], minlength=len(parts)).astype(np.int64),
        peer_logprob=sums_at(row_of_peer, told, len(parts)),
        **{name: getattr(batch, name)[spans] for name in SPAN_COLUMNS} | {"span_row": span_row},
    )


PeerTokens: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]
"""Spans, log-probs and bytes of P peer tokens."""
_NO_TOKENS: PeerTokens = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)


def _peer_tokens(batch: AlignedBatch, part: RowPart, number: npt.NDArray[np.int32]) -> PeerTokens:
    """Return the peer tokens of one part; `number` gives the spans their new numbers."""
    spans, logprobs, lengths = _NO_TOKENS
    if part.row is not None:
        peer = slice(batch.peer_offsets[part.row], batch.peer_offsets[part.row + 1])
        old, logprobs, lengths = batch.peer_span_of_token[peer], batch.peer_logprobs[peer], batch.peer_token_bytes[peer]
        spans = old.copy()
        spans[old >= 0] = number[old[old >= 0]]
    if part.unsaid is not None:
        spans = np.concatenate([spans, np.full(len(part.unsaid.special), -1, dtype=np.int32)])
        logprobs = np.concatenate([logprobs, part.unsaid.logprobs])
        lengths = np.concatenate([lengths, part.unsaid.byte_lengths])
    return spans, logprobs, lengths


def _reasons(batch: AlignedBatch, parts: Sequence[RowPart]) -> list[Reason]:
    """Return the reasons of rejected parts, in their order."""
    found = [batch.reject_reason[part.row] for part in parts if part.row is not None]
    return [reason for reason in found if reason]


def _joined_flags(batch: AlignedBatch, parts: Sequence[RowPart]) -> int:
    flags = 0
    for part in parts:
        flags |= int(batch.flags[part.row]) if part.row is not None else 0
    return flags
