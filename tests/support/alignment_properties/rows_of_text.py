"""An answer in the receiver's tokens: its text, its end, its spans, its flags, its log-probabilities."""

import itertools
import unicodedata
from random import Random

import numpy as np

from mrl.alignment.flags import Flag
from mrl.alignment.normalization import normalize_nfc
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import AlignedTrace, translate_batch
from mrl.records.finish import FinishReason
from tests.support.alignment_properties.definitions import readable, slow_spans
from tests.support.alignment_properties.generated import (
    FRAGMENTS,
    PLAIN,
    make_answer,
    make_batch,
    make_lengths,
    make_text,
)
from tests.support.alignment_properties.kinds import ENDLESS, KINDS, Receivers, can_write

EXAMPLES = 25
NO_LIMIT = 10_000


def check_rows_stand_for_the_peer_text(receivers: Receivers, random: Random) -> None:
    """Span for span the receiver's bytes are the peer's, the tail behind the last whole character is dropped, no
    special is emitted but the EOS, and nothing is rejected that can be expressed.
    """
    for kind in KINDS:
        expect_rows(kind, receivers[kind], make_batch(random, EXAMPLES))


def expect_rows(kind: str, receiver: Receiver, answers: list[PeerAnswer]) -> None:
    """Check the rows of answers of peers with other tokenizers."""
    batch = translate_batch(answers, receiver, max_tokens=NO_LIMIT)
    assert batch.num_rows == len(answers)
    for row, answer in enumerate(answers):
        expect_row(kind, receiver, answer, batch.row(row))


def expect_row(kind: str, receiver: Receiver, answer: PeerAnswer, trace: AlignedTrace) -> None:
    """Check the row of an answer of a peer with another tokenizer."""
    expect_booked(answer, trace)
    count, text = readable(answer)
    wanted = "" if can_write(kind, text) else "bytes_differ"
    if not text:
        wanted = "utf8" if answer.completion else "empty"
    assert trace.reject_reason == wanted
    if wanted:
        assert trace.flags & Flag.REJECT
        assert trace.token_ids.size == trace.span_logprob.size == 0
        assert (trace.peer_span_of_token == -1).all()
        return
    _expect_text(receiver, answer, trace, count, text)


def expect_booked(answer: PeerAnswer, trace: AlignedTrace) -> None:
    """Check that every log-probability and every token of the peer is in a span or dropped."""
    logprobs = answer.logprobs.astype(np.float64)
    assert abs(trace.peer_logprob - logprobs.sum()) < 1e-9
    assert abs(trace.span_logprob.sum() + trace.dropped_logprob - logprobs.sum()) < 1e-9
    assert trace.span_peer_tokens.sum() + trace.dropped_tokens == len(logprobs) == len(trace.peer_span_of_token)
    for number, logprob in enumerate(trace.span_logprob):
        inside = logprobs[trace.peer_span_of_token == number]
        assert len(inside) == trace.span_peer_tokens[number] > 0
        assert abs(inside.sum() - logprob) < 1e-9
        assert (trace.span_of_token == number).sum() == trace.span_receiver_tokens[number] > 0


def _expect_text(receiver: Receiver, answer: PeerAnswer, trace: AlignedTrace, count: int, text: str) -> None:
    read = unicodedata.normalize("NFC", text) if receiver.reads_nfc else text
    whole = count == len(answer.special)
    has_eos = whole and answer.finish_reason == "stop" and bool(answer.special[-1]) and not answer.byte_lengths[-1]
    body = trace.token_ids[:-1] if has_eos else trace.token_ids
    assert receiver.completion_bytes(body) == read.encode()
    assert not set(body.tolist()) & receiver.table.special_ids
    assert body.tolist() == receiver.cut_texts([read], [read.encode()]).token_ids.tolist()
    if has_eos:
        assert trace.token_ids[-1] == receiver.eos_id
        assert trace.span_of_token[-1] == trace.peer_span_of_token[-1] == len(trace.span_logprob) - 1
        assert trace.span_receiver_tokens[-1] == 1
        assert trace.span_bytes[-1] == 0
    assert (trace.peer_span_of_token >= 0).tolist() == [place < count for place in range(len(answer.special))]
    assert bool(trace.flags & Flag.TAIL) == (answer.finish_reason != "stop" or not whole)
    assert bool(trace.flags & Flag.NORM) == (read != text)
    assert bool(trace.flags & Flag.NONCANON) == answer.noncanonical
    assert bool(trace.flags & Flag.EOS_UNMAPPED) == (answer.finish_reason == "stop" and whole and not has_eos)
    assert bool(trace.flags & Flag.SPECIAL_IN) == (int(answer.special.sum()) > answer.ends_with_eos)
    assert not trace.flags & (Flag.REJECT | Flag.RECV_TRUNC | Flag.SPECIAL_OUT)
    _expect_boundaries(receiver, answer, trace, count, has_eos)


def _expect_boundaries(receiver: Receiver, answer: PeerAnswer, trace: AlignedTrace, count: int, has_eos: bool) -> None:
    """Check that every span ends at the same text on both sides, and that spans of text in NFC are the definition's."""
    peer = [int(length) for length in answer.byte_lengths[:count]]
    body = trace.token_ids[: len(trace.token_ids) - has_eos]
    own = receiver.byte_lengths(body, np.array([0, len(body)])).tolist()
    own_bytes = receiver.completion_bytes(body)
    for number in range(len(trace.span_logprob) - has_eos):
        peer_end = sum(n for n, span in zip(peer, trace.peer_span_of_token, strict=False) if span <= number)
        own_end = sum(n for n, span in zip(own, trace.span_of_token, strict=False) if span <= number)
        prefix = answer.completion[:peer_end]
        if trace.flags & Flag.NORM:
            characters = unicodedata.normalize("NFC", prefix.decode(errors="surrogateescape"))
            prefix = characters.encode(errors="surrogateescape")
        assert own_bytes[:own_end] == prefix
        assert trace.span_bytes[: number + 1].sum() == own_end
    if trace.flags & Flag.NORM:
        _expect_ends_before_ascii(answer.completion[: sum(peer)], peer, own, trace)
    else:
        if has_eos:
            peer[-1], own = 1, [*own, 1]
        spans = slow_spans(peer, own)
        assert trace.span_peer_tokens.tolist() == [len(places) for places, _ in spans]
        assert trace.span_receiver_tokens.tolist() == [len(places) for _, places in spans]


def _expect_ends_before_ascii(data: bytes, peer: list[int], own: list[int], trace: AlignedTrace) -> None:
    """Check that spans end before ASCII characters where both sides do: normalising moves nothing across these."""
    span_ends, own_ends = set(np.cumsum(trace.span_bytes).tolist()), set(itertools.accumulate(own))
    for end in itertools.accumulate(peer):
        if end and data[end : end + 1].isascii():
            moved = len(unicodedata.normalize("NFC", data[:end].decode()).encode())
            assert moved not in own_ends or moved in span_ends


def check_every_logprob_is_in_a_span_or_dropped(receivers: Receivers, random: Random) -> None:
    """In each row the peer's total is the spans' total plus the dropped one, whether or not a limit cuts."""
    for kind, max_tokens in itertools.product(KINDS, (6, NO_LIMIT)):
        answers = make_batch(random, EXAMPLES)
        batch = translate_batch(answers, receivers[kind], max_tokens=max_tokens)
        for row, answer in enumerate(answers):
            expect_booked(answer, batch.row(row))


def check_truncation_at_any_token_is_read(receivers: Receivers, random: Random) -> None:
    """An answer cut after each of its tokens in turn is read as far as it goes, and gets no EOS."""
    answer = make_answer(random, make_text(random) + random.choice(("\U0001f469\u200d\U0001f52c", "e\u0301")))
    for kind in KINDS:
        cut = [first_tokens(answer, count) for count in range(1, len(answer.special) + 1)]
        expect_rows(kind, receivers[kind], cut)


def first_tokens(answer: PeerAnswer, count: int) -> PeerAnswer:
    """Return the answer as if its peer had been cut off after `count` tokens."""
    return PeerAnswer(
        completion=answer.completion[: int(answer.byte_lengths[:count].sum())],
        byte_lengths=answer.byte_lengths[:count],
        logprobs=answer.logprobs[:count],
        special=answer.special[:count],
        finish_reason=FinishReason.LENGTH,
        fingerprint=answer.fingerprint,
        noncanonical=answer.noncanonical,
    )


def check_normalised_rows_keep_their_boundaries(receivers: Receivers, random: Random) -> None:
    """Tokens that end outside changed clusters keep their place; others end with the token that leaves the cluster."""
    parts = [part for part in FRAGMENTS if part in PLAIN or not unicodedata.is_normalized("NFC", part)]
    for _ in range(60):
        text = "".join(random.choice(parts) for _ in range(random.randint(1, 6)))
        normalized = normalize_nfc(text)
        if normalized is None:
            assert unicodedata.is_normalized("NFC", text)
            continue
        assert normalized.text == unicodedata.normalize("NFC", text)
        lengths = make_lengths(random, len(text.encode()))
        new = normalized.map_lengths(np.array(lengths, dtype=np.int32)).tolist()
        new_bytes = normalized.text.encode()
        assert sum(new) == len(new_bytes)
        assert min(new) >= 0
        for end, new_end, length in zip(itertools.accumulate(lengths), itertools.accumulate(new), new, strict=True):
            if length:
                prefix = unicodedata.normalize("NFC", text.encode()[:end].decode(errors="ignore"))
                assert prefix.encode() == new_bytes[:new_end][: len(prefix.encode())]
        ascii_ends = [len(text[:at].encode()) for at in range(1, len(text) + 1) if text[at : at + 1].isascii()]
        pieces = np.diff([0, *ascii_ends]).astype(np.int32)
        kept = list(itertools.accumulate(normalized.map_lengths(pieces).tolist()))
        wanted = [len(unicodedata.normalize("NFC", text.encode()[:end].decode()).encode()) for end in ascii_ends]
        assert kept == wanted


def check_an_end_without_counterpart_is_dropped(receivers: Receivers, random: Random) -> None:
    """A receiver without an EOS counts the peer's as dropped and flags it; the text is the same."""
    answers = make_batch(random, 60)
    without = translate_batch(answers, receivers[ENDLESS], max_tokens=NO_LIMIT)
    with_eos = translate_batch(answers, receivers["byte_level"], max_tokens=NO_LIMIT)
    seen = 0
    for row, answer in enumerate(answers):
        trace, longer = without.row(row), with_eos.row(row)
        lost = int(answer.ends_with_eos and bool(longer.token_ids.size) and longer.dropped_tokens == 0)
        assert trace.token_ids.tolist() == longer.token_ids[: len(longer.token_ids) - lost].tolist()
        assert trace.dropped_tokens == longer.dropped_tokens + lost
        assert bool(trace.flags & Flag.EOS_UNMAPPED) == bool(lost or longer.flags & Flag.EOS_UNMAPPED)
        seen += lost
    assert seen
