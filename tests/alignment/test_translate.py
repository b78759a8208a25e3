"""The whole path: bare texts, limits, chunks, what a row tells, and numbers per token."""

import dataclasses
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

import mrl.alignment.translate as translate_module
from mrl.alignment.aligned_batch import AlignedBatch, merge
from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer, bare_text
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.alignment.spreading import SPREADING
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.translate import translate_batch, translate_texts
from mrl.records.finish import FinishReason

TEXTS = ["reverse: yah 12 + 34", "naïve café \U0001f469", "cafe\u0301 sun", "a\u2581b", "hay"]


def text_bytes(batch) -> np.ndarray:
    """[R] bytes of the own text, EOS apart; 0 in rejected rows."""
    return np.bincount(batch.span_row, batch.span_bytes, batch.num_rows).astype(int)


@pytest.fixture(scope="module")
def receivers(folders) -> dict[str, Receiver]:
    return {kind: load_receiver(folders[kind]) for kind in ("byte_level", "byte_level_nfc", "metaspace")}


def written(source: Receiver, texts: list[str], rng: np.random.Generator, *, finished: bool = True) -> list[PeerAnswer]:
    """The texts as the source would have sampled them, with made-up log-probs."""
    cuts = [source.cut_texts([text], [text.encode()]).token_ids for text in texts]
    ids = [np.append(cut, np.int32(source.eos_id)) if finished else cut for cut in cuts]
    logprobs = [-rng.random(len(row)).astype(np.float32) for row in ids]
    return describe_answers(source, ids, logprobs, [FinishReason.STOP if finished else FinishReason.LENGTH] * len(ids))


@pytest.fixture
def batch(receivers) -> AlignedBatch:
    answers = written(receivers["byte_level"], TEXTS, np.random.default_rng(0))
    return translate_batch([*answers, bare_text(b"sun", finished=True)], receivers["metaspace"], max_tokens=99)


def test_bare_texts_take_the_same_path(receivers):
    """A text alone gives the tokens, the end and the normal form that the same text gives with a trace."""
    for receiver in receivers.values():
        answers = [
            dataclasses.replace(answer, fingerprint="peer", token_ids=None)
            for answer in written(receivers["byte_level"], TEXTS, np.random.default_rng(0))
        ]
        traced = translate_batch(answers, receiver, max_tokens=99)
        bare = translate_texts([answer.completion for answer in answers], [True] * 5, receiver, max_tokens=99)
        assert bare.reject_reason == traced.reject_reason
        assert bare.token_ids.tolist() == traced.token_ids.tolist()
        assert bare.row_offsets.tolist() == traced.row_offsets.tolist()
        assert (bare.flags & ~Flag.NONCANON).tolist() == (traced.flags & ~Flag.NONCANON | Flag.UNTRACED).tolist()
        assert bool(bare.flags[2] & Flag.NORM) == receiver.reads_nfc
        assert not bare.span_logprob.any()
        assert bare.span_peer_tokens.tolist() == [1] * bare.span_row.size


def test_bare_texts_that_cannot_be_used_say_why(receivers):
    """No bytes, no UTF-8 and no room are rejections with a reason; only the EOS may be cut off."""
    receiver = receivers["byte_level"]
    texts = [b"", b"\xff", "ok \U0001f469".encode()[:-1], b"reverse: yah", b"y" * (2 << 20)]
    batch = translate_texts(texts, [True] * 5, receiver, max_tokens=1)
    assert batch.reject_reason == ("empty", "utf8", "utf8", "too_long", "size")
    assert batch.token_ids.size == 0
    (row,) = receiver.cut_texts(["reverse: yah"], [b"reverse: yah"]).offsets[1:]
    cut = translate_texts([b"reverse: yah"] * 2, [True, False], receiver, max_tokens=int(row))
    assert cut.flags.tolist() == [Flag.UNTRACED | Flag.RECV_TRUNC, Flag.UNTRACED | Flag.TAIL]
    assert cut.row(0).token_ids.tolist() == cut.row(1).token_ids.tolist()
    with pytest.raises(ValueError, match="longer"):
        translate_texts([b"y"], [True, False], receiver, max_tokens=9)


def test_bare_text_keeps_its_end_to_itself_without_an_own_eos(folders):
    """A finished text has an end that a receiver without EOS cannot express: the text is used, and flagged."""
    endless = Receiver(read_tokenizer_file(folders["byte_level"]), eos_ids=())
    batch = translate_texts([b"yah"] * 2, [True, False], endless, max_tokens=9)
    assert batch.flags.tolist() == [Flag.UNTRACED | Flag.EOS_UNMAPPED, Flag.UNTRACED | Flag.TAIL]
    assert batch.row(0).token_ids.tolist() == batch.row(1).token_ids.tolist()


@pytest.mark.parametrize("max_tokens", [0, -1, -5, -(10**6)])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_no_room_emits_nothing(receivers, kind, max_tokens):
    """Without room for a token every row is too long, own rows, foreign rows and bare texts alike."""
    answers = written(receivers["byte_level"], ["reverse: yah", "hay"], np.random.default_rng(0))
    batch = translate_batch([*answers, bare_text(b"yah", finished=False)], receivers[kind], max_tokens=max_tokens)
    assert batch.reject_reason == ("too_long",) * 3
    assert batch.token_ids.size == batch.span_row.size == 0
    assert batch.dropped_tokens.tolist() == np.diff(batch.peer_offsets).tolist()
    assert batch.dropped_logprob == pytest.approx(batch.peer_logprob)


def test_silent_tokens_fill_a_chunk(receivers, monkeypatch):
    """Answers of few bytes and many tokens are not worked on all at once, and malformed ones weigh what they can."""
    sizes = []
    one_piece = translate_module.translate_chunk

    def counted(answers, receiver, *, max_tokens):
        sizes.append(len(answers))
        return one_piece(answers, receiver, max_tokens=max_tokens)

    monkeypatch.setattr(translate_module, "translate_chunk", counted)
    many = PeerAnswer(
        completion=b"yah",
        byte_lengths=np.array([3] + [0] * 49, dtype=np.int32),
        logprobs=np.zeros(50, dtype=np.float32),
        special=np.zeros(50, dtype=bool),
        finish_reason=FinishReason.LENGTH,
        fingerprint="peer",
    )
    odd = dataclasses.replace(many, special=None, completion=None)
    batch = translate_batch([many, odd] * 6, receivers["metaspace"], max_tokens=9, chunk_bytes=200)
    assert sizes == [4, 4, 4]
    assert batch.reject_reason == ("", "type") * 6


def test_a_row_says_whether_its_text_is_the_peers(receivers):
    """Text bytes are those of the own text; a row is exact unless it was rejected, normalised, or lost some bytes."""
    nfc, metaspace = receivers["byte_level_nfc"], receivers["metaspace"]
    whole = translate_texts([text.encode() for text in TEXTS], [True] * 5, nfc, max_tokens=99)
    assert whole.is_exact.tolist() == [True, True, False, True, True]
    read = [text.encode() for text in TEXTS]
    read[2] = "caf\u00e9 sun".encode()
    assert text_bytes(whole).tolist() == [len(text) for text in read]
    assert whole.cut_bytes.tolist() == [0] * 5
    answers = written(receivers["byte_level"], [TEXTS[0], "a\u2581b"], np.random.default_rng(0))
    torn = dataclasses.replace(bare_text(b"yah\xf0\x9f", finished=False), byte_lengths=np.array([5], np.int32))
    split = dataclasses.replace(
        torn, byte_lengths=np.array([3, 2], np.int32), logprobs=np.zeros(2, np.float32), special=np.zeros(2, bool)
    )
    short = translate_batch([*answers, split], metaspace, max_tokens=2)
    assert short.is_exact.tolist() == [False, False, False]
    lengths = [len(TEXTS[0]), len("a\u2581b".encode()), 5]
    assert (text_bytes(short) + short.cut_bytes).tolist() == lengths
    assert text_bytes(short).tolist()[1:] == [0, 3]


def test_a_row_tells_the_peers_sum(batch):
    """Over the peer's tokens in spans; a row without a trace says so."""
    for index in range(batch.num_rows):
        row = batch.row(index)
        first, end = batch.peer_offsets[index : index + 2]
        used = batch.peer_logprobs[first:end][row.peer_span_of_token >= 0].astype(np.float64)
        assert row.span_peer_tokens.sum() == len(used)
        assert row.span_logprob.sum() == pytest.approx(used.sum())
        assert row.is_traced == (index != 5)
        assert row.token_bytes.sum() == row.span_bytes.sum()


@pytest.mark.parametrize("name", SPREADING)
def test_rules_read_a_row_as_they_read_a_batch(batch, name):
    """Spreading one row gives what spreading the batch gives for it."""
    whole = SPREADING[name](batch)
    for index, (start, end) in enumerate(pairwise(batch.row_offsets)):
        assert np.array_equal(SPREADING[name](batch.row(index)), whole[start:end])


@pytest.mark.parametrize("name", SPREADING)
def test_rules_take_rows_without_tokens(receivers, name):
    """A batch of none and a batch of rejected rows have nothing to spread."""
    for answers in ([], [bare_text(b"", finished=False)] * 2):
        batch = translate_batch(answers, receivers["metaspace"], max_tokens=9)
        assert SPREADING[name](batch).shape == (0,)


def test_merging_needs_little_beside_the_result(receivers):
    """Chunks are copied and let go one by one: the peak stays below 1.3 times the result."""
    part = translate_texts([b"reverse: yah 12 + 34"] * 20, [True] * 20, receivers["byte_level"], max_tokens=99)
    names = [field.name for field in dataclasses.fields(part) if field.name != "reject_reason"]

    def parts():
        for _ in range(40):
            yield dataclasses.replace(part, **{name: np.tile(getattr(part, name), 400) for name in names})

    tracemalloc.start()
    try:
        merged = merge(parts(), 40)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    result_bytes = sum(getattr(merged, name).nbytes for name in names)
    assert result_bytes > 10 << 20
    assert peak_bytes < 1.3 * result_bytes
