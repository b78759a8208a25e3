"""Rows of one batch, rows that are too long, and the figures of each row."""

import dataclasses
import itertools
import unicodedata
from random import Random

import numpy as np

from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import AlignedTrace, _chunks, translate_batch, translate_texts
from mrl.records.finish import FinishReason
from tests.support.alignment_properties.generated import (
    canonical_ids,
    is_whole,
    make_batch,
    make_text,
    sampled_answer,
    text_for,
)
from tests.support.alignment_properties.kinds import KINDS, METASPACE, Receivers, can_write

NO_LIMIT = 10_000


def mixed_batch(random: Random, receivers: Receivers, kind: str, size: int) -> list[PeerAnswer]:
    """Make answers of strangers and of the receiver's own tokenizer, shuffled."""
    own = receivers[kind]
    texts = [text_for(random, own, metaspace=kind in METASPACE) for _ in range(size // 3)]
    answers = make_batch(random, size - size // 3) + [sampled_answer(random, own, text) for text in texts]
    random.shuffle(answers)
    return answers


def same_rows(one: AlignedTrace, other: AlignedTrace) -> None:
    """Check that two rows are equal in every field."""
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def check_batch_equals_row_by_row(receivers: Receivers, random: Random) -> None:
    """A row does not depend on its neighbours, however the batch is cut into chunks."""
    for kind in KINDS:
        answers, receiver = mixed_batch(random, receivers, kind, 12), receivers[kind]
        whole = translate_batch(answers, receiver, max_tokens=9)
        chunked = translate_batch(answers, receiver, max_tokens=9, chunk_bytes=40)
        for field in dataclasses.fields(whole):
            assert np.array_equal(getattr(whole, field.name), getattr(chunked, field.name)), field.name
        for row, answer in enumerate(answers):
            same_rows(whole.row(row), translate_batch([answer], receiver, max_tokens=9).row(0))


def check_cut_answers_are_prefixes(receivers: Receivers, random: Random) -> None:
    """A limit cuts at the last whole span within it, books the rest as dropped, and never leaves an EOS behind."""
    for kind in KINDS:
        answers, receiver = mixed_batch(random, receivers, kind, 12), receivers[kind]
        whole = translate_batch(answers, receiver, max_tokens=NO_LIMIT)
        for max_tokens in (-1, 0, 1, 2, 5, 11):
            cut = translate_batch(answers, receiver, max_tokens=max_tokens)
            for row, answer in enumerate(answers):
                expect_cut(answer, whole.row(row), cut.row(row), max_tokens)


def expect_cut(answer: PeerAnswer, long: AlignedTrace, short: AlignedTrace, max_tokens: int) -> None:
    """Check the part of a row that a limit leaves."""
    ends = np.cumsum(long.span_receiver_tokens)
    kept = int((ends <= max_tokens).sum())
    if long.reject_reason or (len(ends) and not kept):
        assert short.reject_reason == (long.reject_reason or "too_long")
        assert short.dropped_tokens == len(answer.special)
        assert short.token_ids.size == 0
        return
    assert len(short.span_logprob) == kept
    assert short.token_ids.tolist() == long.token_ids[: ends[kept - 1]].tolist()
    assert short.span_logprob.tolist() == long.span_logprob[:kept].tolist()
    assert bool(short.flags & Flag.RECV_TRUNC) == (kept < len(ends))


def check_chunks_hold_bytes_and_tokens(receivers: Receivers, random: Random) -> None:
    """No chunk of several rows exceeds the limit, a token without bytes counting as two bytes; no row is lost."""
    answers = mixed_batch(random, receivers, "byte_level", 24)
    silent = np.zeros(60, np.int32)
    silent[0] = 1
    answers += [
        PeerAnswer(b"y", silent, np.zeros(60, np.float32), np.zeros(60, bool), FinishReason.LENGTH, "p")
        for _ in range(6)
    ]
    random.shuffle(answers)
    for chunk_bytes in (1, 100, 10**6):
        groups = list(_chunks(answers, chunk_bytes))
        assert [answer for group in groups for answer in group] == answers
        weights = [[max(len(answer.completion), 2 * len(answer.special)) for answer in group] for group in groups]
        assert all(sum(group) <= chunk_bytes for group in weights if len(group) > 1)
        assert all(sum(one) + two[0] > chunk_bytes for one, two in itertools.pairwise(weights)), "groups are full"


def check_rows_tell_what_of_the_text_is_left(receivers: Receivers, random: Random) -> None:
    """Each row tells its own bytes, the peer's bytes that were cut off, and whether its text is the peer's."""
    for kind, max_tokens in itertools.product(KINDS, (4, NO_LIMIT)):
        answers, receiver = mixed_batch(random, receivers, kind, 12), receivers[kind]
        batch = translate_batch(answers, receiver, max_tokens=max_tokens)
        for row, answer in enumerate(answers):
            own = receiver.completion_bytes(batch.row(row).token_ids)
            dropped = batch.row(row).peer_span_of_token < 0
            assert batch.row(row).span_bytes.sum() == len(own)
            assert batch.cut_bytes[row] == answer.byte_lengths[dropped].sum()
            assert batch.is_exact[row] == (not batch.reject_reason[row] and own == answer.completion)
            assert batch.is_traced[row]


def check_bare_texts_take_the_same_path(receivers: Receivers, random: Random) -> None:
    """A text without a trace becomes the tokens of its text, whole or without its EOS, and says that it has none."""
    for kind, max_tokens in itertools.product(KINDS, (1, 2, 5, NO_LIMIT)):
        texts = [make_text(random).encode() for _ in range(8)] + [b"", b"\xff", "caf\u00e9".encode()[:-1], b"y"]
        finished = [random.random() < 0.5 for _ in texts]
        batch = translate_texts(texts, finished, receivers[kind], max_tokens=max_tokens)
        assert not batch.is_traced.any()
        for row, (text, end) in enumerate(zip(texts, finished, strict=True)):
            expect_bare(kind, receivers[kind], text, end, batch.row(row), max_tokens)


def expect_bare(kind: str, own: Receiver, text: bytes, end: bool, trace: AlignedTrace, max_tokens: int) -> None:
    """Check the row of a text without a trace against the definition."""
    if not text or not is_whole(text):
        assert trace.reject_reason == ("utf8" if text else "empty")
        return
    if not can_write(kind, text.decode()):
        assert trace.reject_reason == "bytes_differ"
        return
    read = unicodedata.normalize("NFC", text.decode()) if own.reads_nfc else text.decode()
    ids = canonical_ids(own, read)
    fits = len(ids) + end <= max_tokens
    assert trace.reject_reason == ("" if len(ids) <= max_tokens else "too_long")
    if not trace.reject_reason:
        assert trace.token_ids.tolist() == [*ids, *([own.eos_id] if end and fits else [])]
        flags = Flag.UNTRACED | Flag.TAIL * (not end) | Flag.NORM * (read.encode() != text)
        assert trace.flags == flags | Flag.RECV_TRUNC * (not fits)
