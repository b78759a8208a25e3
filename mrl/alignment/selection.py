"""Some rows of an aligned batch as a batch of their own."""

from collections.abc import Sequence

import numpy as np

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.ragged import offsets_of


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
