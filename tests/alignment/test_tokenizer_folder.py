"""Model folders whose tokenizer is not a tokenizer.json."""

import base64
import hashlib
import json
from pathlib import Path

import pytest

from mrl.alignment import rank_table
from mrl.alignment.byte_table import byte_piece, piece_bytes
from mrl.alignment.rank_table import PATTERNS, RankFamily
from mrl.alignment.receiver import load_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.tokenizer_folder import find_tokenizer, read_tokenizer
from mrl.errors import ModelFolderError, TokenizerRefused

TEXT = "reverse: yah 12345 caf\u00e9\n\n  def f(x): <|end|> <think> </s>"
ADDED = {"900": {"content": "<|end|>", "special": True}, "901": {"content": "<think>", "special": False}}
SETTINGS = {"pat_str": PATTERNS["llama3"], "added_tokens_decoder": ADDED, "eos_token": "<|end|>"}


@pytest.fixture(scope="module")
def ranks(tokenizers_by_kind) -> dict[bytes, int]:
    """Single bytes first, then what the merges of a trained byte-level tokenizer make."""
    model = json.loads(tokenizers_by_kind["byte_level"].to_str())["model"]
    pieces = [*(byte_piece(bytes([byte])) for byte in range(256)), *("".join(pair) for pair in model["merges"])]
    return {piece_bytes(piece, "byte_level"): rank for rank, piece in enumerate(dict.fromkeys(pieces))}


@pytest.fixture
def rank_folder(ranks, tmp_path) -> Path:
    """A folder with a rank file and the settings that such a file leaves open."""
    lines = [base64.b64encode(data) + f" {rank}".encode() for data, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


@pytest.fixture
def tekken_folder(ranks, tmp_path) -> Path:
    """A folder as Mistral's: a tekken.json that names its special tokens, and no configuration."""
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(data).decode()} for data, rank in ranks.items()]
    names = ["<unk>", "<s>", "</s>", "[INST]"]
    tekken = {
        "config": {"pattern": PATTERNS["qwen"], "default_vocab_size": len(vocab) + 6, "default_num_special_tokens": 6},
        "vocab": vocab,
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    return tmp_path


def changed(folder: Path, name: str, **changes) -> Path:
    """The folder, with some keys of one of its JSON files set, or taken out where the value is None."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))
    return folder


def test_a_folder_with_only_a_tekken_file(ranks, tekken_folder):
    """Ids follow the special tokens, and the EOS is the one that the file names."""
    receiver = load_receiver(tekken_folder)
    cut = receiver.cut_texts([TEXT], [TEXT.encode()])
    assert not cut.faults
    data = {rank + 6: piece for piece, rank in ranks.items()}
    assert b"".join(data[index] for index in cut.token_ids.tolist()) == TEXT.encode()
    assert receiver.eos_ids == (2,)
    assert receiver.table.special_ids == set(range(6))


def test_a_folder_with_only_a_rank_file(ranks, rank_folder):
    """The settings beside it say how text is split, which tokens are special and which stand for their own text."""
    receiver = load_receiver(rank_folder)
    cut = receiver.cut_texts([TEXT], [TEXT.encode()])
    assert not cut.faults
    data = {rank: piece for piece, rank in ranks.items()} | {901: b"<think>"}
    assert 901 in cut.token_ids.tolist()
    assert 900 not in cut.token_ids.tolist()
    assert b"".join(data[index] for index in cut.token_ids.tolist()) == TEXT.encode()
    assert receiver.eos_ids == (900,)


def test_a_known_rank_file_needs_no_settings(rank_folder, monkeypatch):
    """A file of known digest brings its pattern, its special tokens behind the ranks, and what ends an answer."""
    (rank_folder / "tokenizer_config.json").unlink()
    path = rank_folder / "tokenizer.model"
    num_ranks = len(path.read_bytes().splitlines())
    names = {0: "<|a|>", 3: "<|end|>", 4: "<|stop|>"}
    family = RankFamily(PATTERNS["llama3"], num_ranks, names, 8, ("<|end|>", "<|stop|>"), nfc=True)
    monkeypatch.setitem(rank_table.FAMILIES, hashlib.sha256(path.read_bytes()).hexdigest(), family)
    receiver = load_receiver(rank_folder)
    assert receiver.eos_ids == (num_ranks + 3, num_ranks + 4)
    assert receiver.table.special_ids == set(range(num_ranks, num_ranks + 8))
    assert receiver.reads_nfc
    assert load_receiver(path).fingerprint == receiver.fingerprint


def test_tokenizer_json_goes_first(folders, tekken_folder):
    """Where a folder has both, the file in the common form is read; a file can be named itself."""
    content = (folders["byte_level"] / "tokenizer.json").read_text()
    (tekken_folder / "tokenizer.json").write_text(content)
    assert find_tokenizer(tekken_folder).name == "tokenizer.json"
    assert read_tokenizer(tekken_folder / "tekken.json").path.name == "tekken.json"


def test_the_end_that_a_folder_declares_goes_first(tekken_folder):
    """Configuration files know better than the tokenizer which token ends a turn."""
    assert load_receiver(changed(tekken_folder, "params.json", eos_token_id=[3, 2])).eos_ids == (3, 2)
    assert load_receiver(changed(tekken_folder, "generation_config.json", eos_token_id=[1, 2])).eos_ids == (1, 2)
    assert load_receiver(changed(tekken_folder, "tokenizer_config.json", eos_token="</s>")).eos_ids == (2, 1)


def test_an_unknown_end_is_the_users_to_declare(rank_folder, tekken_folder):
    """No EOS in the file, none declared, or one that is no token: an error that says where to put it."""
    tekken = json.loads((tekken_folder / "tekken.json").read_text())
    listed = [token for token in tekken["special_tokens"] if token["token_str"] != "</s>"]
    changed(tekken_folder, "tekken.json", special_tokens=listed)
    (tekken_folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"no EOS token is declared.*generation_config\.json"):
        load_receiver(tekken_folder)
    with pytest.raises(ModelFolderError, match=r"the EOS is no token of the tokenizer.*99999"):
        load_receiver(changed(tekken_folder, "config.json", eos_token_id=99999))


def test_what_a_rank_file_leaves_open_is_asked_for(rank_folder):
    """Without a pattern the ranks mean nothing, and the error says where to write it."""
    with pytest.raises(ModelFolderError, match=r"how it splits text.*pat_str in tokenizer_config\.json"):
        load_receiver(changed(rank_folder, "tokenizer_config.json", pat_str=None))
    with pytest.raises(ModelFolderError, match="added_tokens_decoder cannot be read"):
        load_receiver(changed(rank_folder, "tokenizer_config.json", **SETTINGS | {"added_tokens_decoder": [1]}))
    broken = SETTINGS | {"added_tokens_decoder": {"7": {"content": "<|end|>", "special": True}}}
    with pytest.raises(ModelFolderError, match="two tokens have one id"):
        load_receiver(changed(rank_folder, "tokenizer_config.json", **broken))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("listed", "given"), [(5, 0), (-300, 0)], ids=["behind a gap", "below the vocabulary's size"])
def test_an_added_token_that_is_numbered_anew_is_refused(folders, tmp_path, special, listed, given):
    """What the library would emit for the token is not what the file says: ids could be mistaken for others.

    `listed`, `given`: ids, counted from the one that follows the vocabulary.
    """
    content = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    own_id = content["added_tokens"][-1]["id"]
    content["added_tokens"][-1] |= {"id": own_id + listed, "special": special}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    ids = f"id {own_id + listed} in the file, id {own_id + given} from the library"
    with pytest.raises(
        TokenizerRefused, match=rf"tokenizer\.json: .*<thïnk>.* another id .*{ids}.*cure: put the token"
    ):
        load_receiver(tmp_path)


def test_folders_without_a_usable_file_say_so(tmp_path):
    """Nothing there, two rank files, or a SentencePiece model: one line with the cure."""
    with pytest.raises(ModelFolderError, match=r"cannot read the tokenizer.*save_pretrained"):
        load_receiver(tmp_path)
    with pytest.raises(ModelFolderError, match="no tokenizer"):
        load_receiver(tmp_path / "missing.json")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ModelFolderError, match=r"no rank file.*SentencePiece.*save_pretrained"):
        load_receiver(tmp_path)
    (tmp_path / "other.tiktoken").write_bytes(b"IQ== 0\n")
    with pytest.raises(ModelFolderError, match=r"several rank files.*other\.tiktoken, tokenizer\.model"):
        load_receiver(tmp_path)


def test_a_model_that_is_no_object_is_one_clear_line(tmp_path):
    """A broken file is the person's mistake, told as one."""
    (tmp_path / "tokenizer.json").write_text('{"model": [1, 2]}')
    with pytest.raises(ModelFolderError, match="the tokenizer's model is no JSON object; got 'list'"):
        read_tokenizer_file(tmp_path)
