"""Parts of an aligned batch as a batch of their own: some of its rows, or the first tokens of each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.ragged import offsets_of, sums_at


def select_rows(batch: AlignedBatch, rows: Sequence[int]) -> AlignedBatch:
    """The batch of these rows, which must be ascending; spans and rows are numbered anew."""
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
    """The batch of the first `counts[r]` own tokens of every row; what the peer has beyond is booked as dropped.

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
