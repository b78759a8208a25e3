"""Answers sampled by policies with known tokenizers, described in bytes and carried to every other kind."""

import itertools
from random import Random

import numpy as np

from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.translate import translate_batch
from tests.support.alignment_properties.generated import (
    canonical_ids,
    described,
    fields_of,
    is_whole,
    make_logprobs,
    sampled_answer,
    text_for,
    text_of,
)
from tests.support.alignment_properties.kinds import KINDS, METASPACE, PREFIXED, Receivers, can_write, usual
from tests.support.alignment_properties.own_tokenizer import expect_untouched
from tests.support.alignment_properties.rows_of_text import expect_row

NO_LIMIT = 10_000


def expect_told(kind: str, source: Receiver, answer: PeerAnswer) -> None:
    """Check that a description of sampled ids has the bytes, lengths and specials of the table, and is found valid."""
    ids = answer.token_ids.tolist()
    joined = b"".join(source.table.pieces[index] for index in ids)
    assert answer.completion == (joined.removeprefix(b" ") if kind in PREFIXED else joined)
    assert answer.byte_lengths.sum() == len(answer.completion)
    assert answer.special.tolist() == [index in source.table.special_ids for index in ids]
    expect_survives_the_wire(answer)
    if answer.finished and is_whole(answer.completion):
        assert answer.noncanonical == (ids[:-1] != canonical_ids(source, text_of(answer)))


def expect_survives_the_wire(answer: PeerAnswer) -> None:
    """Check that an honest answer comes back from its wire form, field for field."""
    received = validate(**answer.fields())
    assert isinstance(received, PeerAnswer)
    for name, value in fields_of(answer).items():
        assert np.array_equal(getattr(received, name), value), name


def check_sampled_answers_travel(receivers: Receivers, random: Random) -> None:
    """Sampled answers arrive at every kind as the same text, for all ordered pairs; between equals ids stay."""
    for name, source in usual(receivers).items():
        answers = [
            sampled_answer(random, source, text_for(random, source, metaspace=name in METASPACE)) for _ in range(4)
        ]
        for answer in answers:
            expect_told(name, source, answer)
        for kind in KINDS:
            batch = translate_batch(answers, receivers[kind], max_tokens=NO_LIMIT)
            for row, answer in enumerate(answers):
                if kind == name:
                    expect_untouched(receivers[kind], answer, batch.row(row))
                else:
                    expect_row(kind, receivers[kind], answer, batch.row(row))


def check_a_leading_special_keeps_the_text(receivers: Receivers, random: Random) -> None:
    """A phantom space is taken from the first token with bytes, not from a special before it."""
    for source in usual(receivers).values():
        ids = [min(source.table.special_ids), *canonical_ids(source, "yah")]
        answer = described(source, ids, make_logprobs(random, len(ids)), finished=False)
        assert answer.completion == b"yah"
        assert answer.byte_lengths.sum() == 3
        assert answer.byte_lengths[0] == 0


def check_other_cuts_are_told_apart(receivers: Receivers, random: Random) -> None:
    """An answer sampled letter by letter is not canonical, one in the tokenizer's own tokens is."""
    for source in usual(receivers).values():
        letters = [source.table.pieces.index(bytes([byte])) for byte in b"reverse"]
        for ids, is_odd in ((canonical_ids(source, "reverse"), False), (letters, True)):
            told = described(source, [*ids, source.eos_id], make_logprobs(random, len(ids) + 1), finished=True)
            assert told.noncanonical == is_odd
            assert told.completion == b"reverse"


def check_swapped_tokenizers_give_swapped_spans(receivers: Receivers, random: Random) -> None:
    """A text carried over and back lands on its own tokens, over the same spans, for every ordered pair of kinds."""
    for name, kind in itertools.permutations(KINDS, 2):
        source, receiver = receivers[name], receivers[kind]
        text = text_for(random, source if source.reads_nfc else receiver, metaspace=True)
        if not (can_write(name, text) and can_write(kind, text)):
            continue
        ids = [*canonical_ids(source, text), source.eos_id]
        answer = described(source, ids, np.zeros(len(ids), np.float32), finished=True)
        there = translate_batch([answer], receiver, max_tokens=NO_LIMIT)
        reply = described(receiver, there.token_ids.tolist(), np.zeros(len(there.token_ids)), finished=True)
        back = translate_batch([reply], source, max_tokens=NO_LIMIT)
        assert back.token_ids.tolist() == ids
        assert back.span_of_token.tolist() == there.peer_span_of_token.tolist()
        assert back.peer_span_of_token.tolist() == there.span_of_token.tolist()
        assert not answer.noncanonical
        assert not reply.noncanonical
