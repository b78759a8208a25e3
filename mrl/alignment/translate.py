"""Peer answers in the receiver's tokens, whole batches at a time.

    1 answers with wrong fields are rejected               5 EOS to EOS, one virtual byte on both sides
    2 equal fingerprints: ids pass through untouched       6 common spans, flat
    3 text: cut to UTF-8 at a peer token, NFC              7 cut at the last whole span within the receiver's limit
    4 encode, compare bytes                                8 book every log-prob: spans + dropped = all

Shapes: R rows; T receiver tokens and P peer tokens of all rows one after the other; S common spans of all rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch as AlignedBatch
from mrl.alignment.aligned_batch import AlignedTrace as AlignedTrace
from mrl.alignment.aligned_batch import Int64s, merge
from mrl.alignment.flags import Flag
from mrl.alignment.own_rows import OwnRows, own_rows
from mrl.alignment.peer_answer import PeerAnswer, bare_text
from mrl.alignment.peer_rows import PeerRows, read_peer_rows
from mrl.alignment.ragged import offsets_of, spread_positions, sums_at
from mrl.alignment.receiver import Receiver
from mrl.alignment.shared_spans import Spans, align_batch

CHUNK_BYTES = 2 << 20
BYTES_PER_TOKEN = 2
"""Bytes that a peer token counts for in a chunk at least, so that tokens without bytes fill it too."""


def translate_batch(
    answers: Sequence[PeerAnswer], receiver: Receiver, *, max_tokens: int, chunk_bytes: int = CHUNK_BYTES
) -> AlignedBatch:
    """Translate every answer into at most `max_tokens` of the receiver's tokens, or reject it with a reason.

    Never raises for what an answer holds, and emits no token where `max_tokens` is not positive. Rows are worked on in
    groups of about `chunk_bytes` of text, so that the memory in use beside the result does not grow with the batch.
    """
    chunks = list(_chunks(answers, chunk_bytes))
    return merge((translate_chunk(part, receiver, max_tokens=max_tokens) for part in chunks), len(chunks))


def translate_texts(
    texts: Sequence[bytes], finished: Sequence[bool], receiver: Receiver, *, max_tokens: int
) -> AlignedBatch:
    """Translate texts of which no trace is known, by the same path: `translate_batch` of `bare_text` answers.

    Their rows are flagged UNTRACED. A text is one peer token, so nothing inside it can be cut: a text with an invalid
    end is rejected with "utf8", a text that does not fit with "too_long". A `finished` text that fits without its EOS
    loses only the EOS and is flagged RECV_TRUNC. Raises ValueError when `finished` is not as long as `texts`.
    """
    answers = [bare_text(text, finished=bool(end)) for text, end in zip(texts, finished, strict=True)]
    return translate_batch(answers, receiver, max_tokens=max_tokens)


def translate_chunk(answers: Sequence[PeerAnswer], receiver: Receiver, *, max_tokens: int) -> AlignedBatch:
    """Do `translate_batch` in one piece."""
    peer = read_peer_rows(answers)
    own = own_rows(peer, receiver)
    peer_tokens = spread_positions(peer.offsets[own.rows], peer.kept[own.rows])
    peer_counts = offsets_of(peer.kept[own.rows])
    spans = align_batch(peer.lengths[peer_tokens], peer_counts, own.lengths, own.offsets)
    is_kept = _within_limit(peer, own, spans, max_tokens)
    return _book(peer, own, spans, peer_tokens, is_kept)


def _chunks(answers: Sequence[PeerAnswer], chunk_bytes: int) -> Iterator[Sequence[PeerAnswer]]:
    """Yield groups of consecutive rows, at least one group."""
    first = taken = 0
    for row, answer in enumerate(answers):
        size = _weight_bytes(answer)
        if row > first and taken + size > chunk_bytes:
            yield answers[first:row]
            first, taken = row, 0
        taken += size
    yield answers[first:]


def _weight_bytes(answer: PeerAnswer) -> int:
    """Return the bytes that an answer counts for in a chunk; nothing in it has been checked yet."""
    size = len(answer.completion) if isinstance(answer.completion, bytes) else 0
    tokens = answer.special.size if isinstance(answer.special, np.ndarray) else 0
    return max(size, BYTES_PER_TOKEN * tokens)


def _within_limit(peer: PeerRows, own: OwnRows, spans: Spans, max_tokens: int) -> npt.NDArray[np.bool_]:
    """Return [S] whether a span lies within its row's first `max_tokens`; reject rows without such a span."""
    is_kept = np.ones(spans.num_spans, dtype=bool)
    max_tokens = max(0, max_tokens)
    for place in np.flatnonzero(np.diff(own.offsets) > max_tokens).tolist():
        row, first = int(own.rows[place]), int(spans.row_starts[place])
        cut = int(spans.of_receiver[own.offsets[place] + max_tokens])
        is_kept[cut : spans.row_starts[place + 1]] = False
        if cut == first:
            peer.reject({row: "too_long"})
        else:
            peer.flags[row] |= Flag.RECV_TRUNC
    return is_kept


def _book(
    peer: PeerRows, own: OwnRows, spans: Spans, peer_tokens: Int64s, is_kept: npt.NDArray[np.bool_]
) -> AlignedBatch:
    """Return the batch, with every peer log-prob in a span or dropped."""
    num_rows, num_spans = len(peer.answers), int(is_kept.sum())
    number = np.where(is_kept, np.cumsum(is_kept, dtype=np.int32) - 1, -1).astype(np.int32)
    peer_span = np.full(len(peer.logprobs), -1, dtype=np.int32)
    peer_span[peer_tokens] = number[spans.of_peer]
    of_token = number[spans.of_receiver]
    is_own_kept = of_token >= 0
    of_token, token_ids, token_bytes = of_token[is_own_kept], own.token_ids[is_own_kept], own.text_lengths[is_own_kept]
    span_row = np.repeat(own.rows, np.diff(spans.row_starts))[is_kept].astype(np.int32)
    token_counts = np.bincount(span_row[of_token], minlength=num_rows)
    is_booked = peer_span >= 0
    booked = peer_span[is_booked]
    peer_row = np.repeat(np.arange(num_rows), np.diff(peer.offsets))
    dropped_row = peer_row[~is_booked]
    logprobs = peer.logprobs.astype(np.float64)
    flags = peer.flags.copy()
    for row, reason in peer.faults.items():
        flags[row] |= Flag.REJECT | (Flag.SPECIAL_OUT if reason == "special_out" else 0)
    return AlignedBatch(
        token_ids=token_ids,
        row_offsets=offsets_of(token_counts),
        token_bytes=token_bytes,
        span_of_token=of_token,
        peer_offsets=peer.offsets,
        peer_logprobs=peer.logprobs,
        peer_token_bytes=peer.byte_lengths,
        peer_span_of_token=peer_span,
        span_row=span_row,
        span_logprob=sums_at(booked, logprobs[is_booked], num_spans),
        span_peer_tokens=np.bincount(booked, minlength=num_spans).astype(np.int32),
        span_receiver_tokens=np.bincount(of_token, minlength=num_spans).astype(np.int32),
        span_bytes=sums_at(of_token, token_bytes, num_spans).astype(np.int32),
        flags=flags,
        reject_reason=tuple(peer.faults.get(row, "") for row in range(num_rows)),
        dropped_logprob=sums_at(dropped_row, logprobs[~is_booked], num_rows),
        dropped_tokens=np.bincount(dropped_row, minlength=num_rows).astype(np.int64),
        peer_logprob=sums_at(peer_row, logprobs, num_rows),
    )
