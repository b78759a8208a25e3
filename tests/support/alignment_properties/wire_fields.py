"""Lying fields of an answer, which give a rejection with its reason, never an exception or a wrong trace."""

from random import Random

import numpy as np

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import FREE_TOKENS, MAX_TOKENS_PER_BYTE, PeerAnswer, validate
from mrl.alignment.translate import AlignedTrace, translate_batch
from mrl.records.finish import FinishReason
from tests.support.alignment_properties.answers_told_by_sources import expect_survives_the_wire
from tests.support.alignment_properties.batches_and_limits import same_rows
from tests.support.alignment_properties.generated import fields_of, make_answer, make_logprobs, sampled_answer, text_for
from tests.support.alignment_properties.kinds import KINDS, METASPACE, Receivers
from tests.support.alignment_properties.raising import never_raises
from tests.support.alignment_properties.rows_of_text import expect_booked, expect_row

NO_LIMIT = 10_000


def honest_answer(random: Random) -> PeerAnswer:
    """Draw an answer of a known text in at least three tokens with bytes."""
    answer = make_answer(random, "reverse: yah")
    while (answer.byte_lengths > 0).sum() < 3:
        answer = make_answer(random, "reverse: yah")
    return answer


def lies(answer: PeerAnswer) -> list[tuple[str, dict]]:
    """Return impossible fields, each with the reason of its rejection."""
    lengths, logprobs = answer.byte_lengths, answer.logprobs
    last = np.arange(len(lengths)) == len(lengths) - 1
    first, second = np.flatnonzero(lengths)[:2]
    negative = lengths.copy()
    negative[first] += negative[second] + 1
    negative[second] = -1
    return [
        ("lengths", {"byte_lengths": lengths + last.astype(np.int32)}),
        ("lengths", {"byte_lengths": negative}),
        ("lengths", {"completion": answer.completion + b"x"}),
        ("lengths", {"special": np.ones(len(lengths), dtype=bool)}),
        ("logprobs", {"logprobs": np.where(last, np.nan, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, np.inf, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, -np.inf, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, 0.01, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, -1e6, logprobs).astype(np.float32)}),
        ("shape", {"logprobs": logprobs[:-1]}),
        ("shape", {"special": np.append(answer.special, True)}),
        ("shape", {"token_ids": np.zeros(len(lengths) + 1, dtype=np.int32)}),
        ("size", {"fingerprint": "x" * 1000}),
        ("size", {"completion": b"x" * (2 << 20)}),
        ("type", {"fingerprint": 7}),
        ("type", {"completion": "text"}),
        ("type", {"finish_reason": "eos"}),
        ("type", {"finish_reason": True}),
        ("type", {"byte_lengths": None}),
        ("type", {"byte_lengths": np.ma.array(lengths, mask=last)}),
        ("type", {"logprobs": np.ma.array(logprobs, mask=last)}),
        ("type", {"special": np.ma.array(answer.special, mask=last)}),
        ("type", {"traced": 1}),
    ]


def check_lying_fields_are_rejected(receivers: Receivers, random: Random) -> None:
    """Each lie is a rejection with its reason, on the wire and inside a batch, and harms no neighbour."""
    truth = honest_answer(random)
    expect_survives_the_wire(truth)
    for reason, lie in lies(truth):
        with never_raises(lie):
            assert validate(**(fields_of(truth) | lie)) == Rejected(reason), lie
            liar = PeerAnswer(**(fields_of(truth) | lie))
            batch = translate_batch([truth, liar, truth], receivers["byte_level"], max_tokens=99)
        assert batch.reject_reason == ("", reason, ""), lie
        assert batch.row(1).token_ids.size == batch.row(1).peer_span_of_token.size == 0
        same_rows(batch.row(0), batch.row(2))
    for name in ("byte_lengths", "logprobs", "special"):
        with never_raises(name):
            assert isinstance(validate(**(truth.fields() | {name: truth.fields()[name][:-1]})), Rejected)


def spoilt(random: Random, value: object) -> object:
    """Return a field as a broken or dishonest sender might write it."""
    if isinstance(value, np.ndarray) and value.size and random.random() < 0.6:
        return random.choice(spoilt_arrays(random, value))
    if isinstance(value, bytes) and value and random.random() < 0.6:
        at = random.randrange(len(value))
        return value[:at] + random.choice((b"", bytes([random.randrange(256)]), value)) + value[at + 1 :]
    things = [None, -1, "x", 2.5, float("nan"), [1], {}, range(3), True, False, b"", bytearray(4), memoryview(b"1234")]
    arrays = [np.zeros((2, 2)), np.zeros(0), np.array("x"), np.array([None]), np.array([1j]), np.ma.masked_all(2)]
    return random.choice([random.randbytes(random.randint(0, 40)), np.datetime64("now"), *things, *arrays])


def spoilt_arrays(random: Random, value: np.ndarray) -> list[object]:
    """Return variants of an array: with another number, order, length, type or shape."""
    at = random.randrange(len(value))
    changed = value.copy()
    changed[at] = random.choice([0, 1, changed[at] + 1])
    forms = [changed, value[::-1], value[:at], np.repeat(value, 2), value.reshape(1, -1), value[::-1].tobytes()]
    hidden = [np.ma.array(value, mask=changed == changed[at]), (value != 0) * 256, value.view(np.recarray)]
    with np.errstate(all="ignore"):
        types = [changed.astype(kind) for kind in (">i4", "i8", "u1", "f8", "f2", bool, object, "c8", "S3")]
        wide = [changed.astype("i8") + 2**40, changed.astype("u8") + 2**63, changed.astype("f8") * 1e300]
    return [*forms, *hidden, *types, *wide]


def check_spoilt_fields_never_give_a_wrong_trace(receivers: Receivers, random: Random) -> None:
    """No field that a sender may write raises an exception.

    An answer that is found valid is carried over as its fields say, and the honest neighbours come out as without it.
    """
    for _ in range(60):
        kind, honest = someones_answer(random, receivers)
        fields = fields_of(honest) if random.random() < 0.5 else honest.fields()
        for name in random.sample(sorted(fields), random.choice((1, 1, 2))):
            fields[name] = spoilt(random, fields[name])
        expect_harmless(kind, receivers, honest, fields)
    for name in ("byte_lengths", "logprobs", "special", "token_ids"):
        kind, honest = someones_answer(random, receivers)
        value = getattr(honest, name)
        for spoil in spoilt_arrays(random, honest.byte_lengths if value is None else value):
            expect_harmless(kind, receivers, honest, fields_of(honest) | {name: spoil})


def someones_answer(random: Random, receivers: Receivers) -> tuple[str, PeerAnswer]:
    """Draw a kind, and an honest answer of its own tokenizer or of a stranger's."""
    kind = random.choice(KINDS)
    text = text_for(random, receivers[kind], metaspace=kind in METASPACE)
    is_own = random.random() < 0.5
    return kind, sampled_answer(random, receivers[kind], text) if is_own else make_answer(random)


def expect_harmless(kind: str, receivers: Receivers, honest: PeerAnswer, fields: dict) -> None:
    """Check a sender's fields between two honest answers: no exception, and no harm to the neighbours."""
    with never_raises(fields):
        told = validate(**fields)
        assert isinstance(told, PeerAnswer | Rejected)
        liar = told if isinstance(told, PeerAnswer) else PeerAnswer(**fields)
        alone = translate_batch([honest], receivers[kind], max_tokens=NO_LIMIT)
        batch = translate_batch([honest, liar, honest], receivers[kind], max_tokens=NO_LIMIT)
    same_rows(batch.row(0), alone.row(0))
    same_rows(batch.row(2), alone.row(0))
    if isinstance(told, PeerAnswer):
        expect_as_told(kind, receivers, told, batch.row(1))


def expect_as_told(kind: str, receivers: Receivers, told: PeerAnswer, trace: AlignedTrace) -> None:
    """Check that an answer that was found valid became what it says, whether or not that was sampled."""
    if told.fingerprint != receivers[kind].fingerprint or told.token_ids is None:
        expect_row(kind, receivers[kind], told, trace)
        return
    expect_booked(told, trace)
    if not trace.reject_reason:
        assert trace.token_ids.tolist() == told.token_ids.tolist()
        assert receivers[kind].completion_bytes(trace.token_ids) == told.completion
        assert trace.span_bytes.tolist() == told.byte_lengths.tolist()


def check_odd_receivers_of_odd_rows_never_raise(receivers: Receivers, random: Random) -> None:
    """An empty batch, rows without tokens, and rows of specials alone are counted, not raised."""
    nothing = {
        name: np.zeros(0, dtype) for name, dtype in (("byte_lengths", "i4"), ("logprobs", "f4"), ("special", "?"))
    }
    for kind in KINDS:
        receiver = receivers[kind]
        ids = {"token_ids": np.zeros(0, np.int32)}
        frame = {
            "completion": b"",
            "finish_reason": random.choice(list(FinishReason)),
            "fingerprint": receiver.fingerprint,
        }
        silent = {
            "byte_lengths": np.zeros(2, np.int32),
            "logprobs": make_logprobs(random, 2),
            "special": np.ones(2, bool),
        }
        with never_raises(kind):
            assert translate_batch([], receiver, max_tokens=9).num_rows == 0
            rows = [
                PeerAnswer(**nothing, **frame),
                PeerAnswer(**nothing, **frame, **ids),
                PeerAnswer(**silent, **frame),
            ]
            batch = translate_batch(rows, receiver, max_tokens=9)
        assert batch.reject_reason == ("empty", "empty", "empty")
        assert batch.dropped_tokens.tolist() == [0, 0, 2]


def check_floods_of_silent_tokens_are_refused(receivers: Receivers, random: Random) -> None:
    """More than four tokens per byte and 64 are refused as absurd; just as many are not."""
    for text in (b"yah", b"reverse: yah"):
        limit = MAX_TOKENS_PER_BYTE * len(text) + FREE_TOKENS
        assert limit == 4 * len(text) + 64
        for size, wanted in ((limit, ""), (limit + 1, "size")):
            lengths = np.zeros(size, np.int32)
            lengths[random.randrange(size)] = len(text)
            flood = PeerAnswer(
                text, lengths, np.zeros(size, np.float32), np.zeros(size, bool), FinishReason.LENGTH, "peer"
            )
            told = validate(**flood.fields())
            assert isinstance(told, PeerAnswer) if not wanted else told == Rejected("size")
            assert translate_batch([flood], receivers["metaspace"], max_tokens=99).reject_reason == (wanted,)
