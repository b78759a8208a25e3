import base64
import json
from random import Random

import pytest

from mrl.alignment.byte_table import byte_piece, piece_bytes
from mrl.alignment.rank_file import PATTERNS, load_tekken, load_tiktoken_ranks
from mrl.errors import ModelFolderError
from tests.support.retokenizing import Retokenized, retokenize

SPECIALS = {"<|endoftext|>": 9000, "<|im_end|>": 9001}
UNJOINED = b"WYV"
"""A piece that no two pieces make: only a pre-token that is this text becomes it."""
TEXT = "WYV reverse: yah 12345 caf\u00e9\n\n  def f(x): \U0001f469\u200d\U0001f52c </s>"


def ranks_of(tokenizer) -> dict[bytes, int]:
    """The pieces of a trained byte-level tokenizer: single bytes first, then in the order in which they were merged."""
    model = json.loads(tokenizer.to_str())["model"]
    single = [byte_piece(bytes([byte])) for byte in range(256)]
    pieces = [*single, *("".join(pair) for pair in model["merges"])]
    return {piece_bytes(piece, "byte_level"): rank for rank, piece in enumerate(dict.fromkeys(pieces))}


@pytest.fixture(scope="module")
def ranks(tokenizers_by_kind):
    ranks = ranks_of(tokenizers_by_kind["byte_level"])
    return ranks | {UNJOINED: len(ranks)}


@pytest.fixture
def tiktoken_file(ranks, tmp_path):
    lines = [base64.b64encode(data) + b" " + str(rank).encode() for data, rank in ranks.items()]
    (tmp_path / "ranks.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return tmp_path / "ranks.tiktoken"


@pytest.fixture
def tekken_file(ranks, tmp_path):
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(data).decode()} for data, rank in ranks.items()]
    config = {"pattern": PATTERNS["qwen"], "default_vocab_size": len(vocab) + 10, "default_num_special_tokens": 10}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return tmp_path / "tekken.json"


def test_ids_are_ranks(ranks, tiktoken_file):
    """Ids are the ranks of the file, join to the text, and specials stay silent."""
    receiver = load_tiktoken_ranks(tiktoken_file, pattern="llama3", special_tokens=SPECIALS, eos="<|im_end|>")
    result = retokenize(receiver, TEXT.encode(), finished=True, max_tokens=999)
    assert isinstance(result, Retokenized)
    assert result.token_ids[-1] == receiver.eos_id == 9001
    data = {rank: piece for piece, rank in ranks.items()}
    assert b"".join(data[index] for index in result.token_ids[:-1].tolist()) == TEXT.encode()
    assert receiver.table.special_ids == set(SPECIALS.values())


def test_ids_are_those_of_tiktoken(ranks, tiktoken_file):
    """The reading through `tokenizers` gives the ids of tiktoken itself."""
    tiktoken = pytest.importorskip("tiktoken")
    receiver = load_tiktoken_ranks(tiktoken_file, pattern="qwen", special_tokens=SPECIALS, use_tiktoken=False)
    encoding = tiktoken.Encoding("test", pat_str=PATTERNS["qwen"], mergeable_ranks=ranks, special_tokens=SPECIALS)
    random = Random(0)
    words = [piece.decode() for piece in ranks if piece.isascii() and len(piece) > 1]
    texts = [TEXT, *("".join(random.choice(words) for _ in range(6)) for _ in range(200))]
    for text in texts:
        result = retokenize(receiver, text.encode(), finished=False, max_tokens=999)
        assert result.token_ids.tolist() == encoding.encode_ordinary(text)
    assert receiver.encodes_with == "tokenizers"


def test_tekken_ids_follow_its_specials(ranks, tekken_file):
    """In a tekken file the specials take the first ids, named or not, and the EOS is among them."""
    receiver = load_tekken(tekken_file)
    assert receiver.eos_id == 2
    assert receiver.table.special_ids == set(range(10))
    assert receiver.table.pieces[10:] == tuple(ranks)
    result = retokenize(receiver, TEXT.encode(), finished=False, max_tokens=999)
    assert receiver.completion_bytes(result.token_ids) == TEXT.encode()


def test_family_that_reads_nfc(tiktoken_file):
    """Whether a family normalises is told by the caller, since the file does not say."""
    plain = load_tiktoken_ranks(tiktoken_file, pattern="qwen", special_tokens=SPECIALS)
    nfc = load_tiktoken_ranks(tiktoken_file, pattern="qwen", special_tokens=SPECIALS, nfc=True)
    assert (plain.reads_nfc, nfc.reads_nfc) == (False, True)
    assert plain.fingerprint != nfc.fingerprint
    with pytest.raises(ValueError, match="no EOS"):
        _ = plain.eos_id


def test_broken_files_say_so(tiktoken_file, tekken_file, tmp_path):
    """A file that is no rank file, lacks single bytes, or an EOS that is no special token, is the user's to cure."""
    (tmp_path / "other").write_bytes(b"not base64 at all\n")
    with pytest.raises(ModelFolderError, match="cannot read the rank file"):
        load_tiktoken_ranks(tmp_path / "other", pattern="qwen", special_tokens={})
    (tmp_path / "holes").write_bytes(b"".join(tiktoken_file.read_bytes().splitlines(keepends=True)[:100]))
    with pytest.raises(ModelFolderError, match="byte for byte"):
        load_tiktoken_ranks(tmp_path / "holes", pattern="qwen", special_tokens={})
    with pytest.raises(ModelFolderError, match=r"EOS is no special.*nothing"):
        load_tiktoken_ranks(tiktoken_file, pattern="qwen", special_tokens=SPECIALS, eos="nothing")
    tekken_file.write_text("{}")
    with pytest.raises(ModelFolderError, match="cannot read the tekken file"):
        load_tekken(tekken_file)
