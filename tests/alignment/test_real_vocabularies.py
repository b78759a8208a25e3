"""Real vocabularies, read from the packages that carry them, against the libraries that define them."""

import hashlib
import unicodedata
from pathlib import Path
from random import Random

import numpy as np
import pytest

from mrl.alignment.card_text import card_texts
from mrl.alignment.pair_card import coverage_of, pair_floors, translated
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.residual import KINDS

for package in ("tiktoken", "sentencepiece", "mistral_common", "dashscope"):
    pytest.importorskip(package)
import real_vocabularies  # noqa: E402
import sentencepiece  # noqa: E402
import tiktoken  # noqa: E402

pytestmark = pytest.mark.thorough


# Peer, receiver -> 1:1 share of receiver tokens in percent on worked word problems, as measured on other such texts.
MEASURED = {
    ("qwen", "tekken"): 97.7,
    ("tekken", "qwen"): 98.5,
    ("qwen", "mistral_spm"): 91.0,
    ("mistral_spm", "qwen"): 95.1,
}


@pytest.fixture(scope="module")
def folders(request) -> dict[str, Path]:
    """Folders of three families; made once and kept by pytest's cache."""
    root = (
        Path(request.config.cache.mkdir("vocabularies"))
        / hashlib.sha256(Path(real_vocabularies.__file__).read_bytes()).hexdigest()[:16]
    )
    return {name: real_vocabularies.make_folder(name, root) for name in ("qwen", "tekken", "mistral_spm")}


@pytest.fixture(scope="module")
def receivers(folders) -> dict[str, Receiver]:
    return {name: load_receiver(folder) for name, folder in folders.items()}


def texts() -> list[str]:
    """Every kind of the built-in texts, a part of the long ones."""
    return [text for rows in card_texts().values() for text in rows[:: max(1, len(rows) // 20)]]


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_byte_table_is_that_of_tiktoken(receivers, name):
    """Every rank stands for the bytes that tiktoken gives it."""
    ranks, pattern, shift = real_vocabularies.read_ranks(name)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    pieces = receivers[name].table.pieces
    assert len(ranks) > 100_000
    assert all(pieces[rank + shift] == encoding.decode_single_token_bytes(rank) for rank in ranks.values())


@pytest.mark.parametrize("name", ["qwen", "tekken"])
def test_ids_are_those_of_tiktoken(receivers, name):
    """Texts without literals of added tokens get the ids that tiktoken gives them."""
    ranks, pattern, shift = real_vocabularies.read_ranks(name)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    receiver = receivers[name]
    plain = [text for text in texts() if "<think>" not in text]
    if receiver.reads_nfc:
        plain = [unicodedata.normalize("NFC", text) for text in plain]
    cut = receiver.cut_texts(plain, [text.encode() for text in plain])
    assert not cut.faults
    assert cut.token_ids.tolist() == [i + shift for text in plain for i in encoding.encode_ordinary(text)]


def test_byte_table_is_that_of_sentencepiece(receivers):
    """Byte pieces are their byte, other pieces what SentencePiece decodes them to behind another piece."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(real_vocabularies.source_file("mistral_spm")))
    receiver = receivers["mistral_spm"]
    x = model.piece_to_id("x")
    for index in range(model.get_piece_size()):
        piece = receiver.table.pieces[index]
        if model.is_byte(index):
            assert piece == bytes([int(model.id_to_piece(index)[3:5], 16)])
        elif not (model.is_control(index) or model.is_unknown(index)):
            assert b"x" + piece == model.decode([x, index]).encode()
        else:
            assert piece == b""


def test_ids_are_those_of_sentencepiece(receivers):
    """Texts without the literal metaspace mark get SentencePiece's own ids."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(real_vocabularies.source_file("mistral_spm")))
    plain = [text for text in texts() if "\u2581" not in text]
    cut = receivers["mistral_spm"].cut_texts(plain, [text.encode() for text in plain])
    assert not cut.faults
    assert cut.token_ids.tolist() == [i for text in plain for i in model.encode(text)]


@pytest.mark.parametrize(("peer", "receiver"), MEASURED)
def test_coverage_of_word_problems_is_near_what_was_measured(receivers, peer, receiver):
    """On worked word problems the 1:1 share is within four points of that on other worked word problems."""
    _, batch = translated(receivers[peer], receivers[receiver], card_texts()["math"][:60])
    coverage = coverage_of(batch)
    assert 100 * coverage.share["one_to_one"] == pytest.approx(MEASURED[peer, receiver], abs=4)
    assert sum(coverage.share[kind] for kind in KINDS) == pytest.approx(1)
    assert not coverage.rejected


def test_same_policy_through_real_tokenizers(receivers):
    """Whole texts agree to 1e-9, spans differ, and the residual telescopes."""
    for pair in (("qwen", "tekken"), ("qwen", "mistral_spm")):
        for floor in pair_floors(pair, tuple(receivers[name] for name in pair), np.random.default_rng(0)):
            assert floor.max_sequence_nats < 1e-9
            assert 0.03 < floor.one_to_one_std_nats < 0.3
            assert floor.cumulative_std[100] < 0.3 * floor.independent_std[100]


@pytest.mark.parametrize("name", ["qwen", "tekken", "mistral_spm"])
def test_cut_in_the_middle_of_anything(receivers, name):
    """Own ids cut anywhere still add up to a prefix of the text's bytes."""
    receiver, random = receivers[name], Random(0)
    for text in texts()[:40]:
        if receiver.reads_nfc:
            text = unicodedata.normalize("NFC", text)
        cut = receiver.cut_texts([text], [text.encode()])
        end = random.randint(0, len(cut.token_ids))
        if not cut.faults:
            assert text.encode().startswith(receiver.completion_bytes(cut.token_ids[:end]))
