"""The whole path: bare texts, chunks, and the merging of batches."""

import dataclasses
import tracemalloc

import numpy as np
import pytest

import mrl.alignment.translate as translate_module
from mrl.alignment.aligned_batch import merge
from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.translate import translate_batch, translate_texts
from mrl.records.finish import FinishReason

TEXTS = ["reverse: yah 12 + 34", "naïve café \U0001f469", "cafe\u0301 sun", "a\u2581b", "hay"]


@pytest.fixture(scope="module")
def receivers(folders) -> dict[str, Receiver]:
    return {kind: load_receiver(folders[kind]) for kind in ("byte_level", "byte_level_nfc", "metaspace")}


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
