"""`mrl align`: the card and the two segmentations."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mrl.alignment.pair_card import SpanText
from mrl.cli.align import segmentations
from mrl.cli.main import main

TEXT = "reverse: yah sun nus hay lamp pmal 12 + 34 = 46\n"


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[str, str]:
    """Two model folders: a tokenizer that merges, and one that cuts letters apart."""
    root = tmp_path_factory.mktemp("pair")
    for name, size in (("words", 400), ("letters", 257)):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
        )
        tokenizer.train_from_iterator([TEXT] * 9, trainer)
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
        (root / name / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return str(root / "words"), str(root / "letters")


def test_card_prints_and_saves(pair, tmp_path: Path, capsys):
    """Coverage of the given text, the floor, and two files whose paths are printed last."""
    text = tmp_path / "own.txt"
    text.write_text(TEXT)
    assert main(["align", "card", *pair, "--text", str(text), "--out", str(tmp_path / "cards")]) == 0
    shown = capsys.readouterr().out
    for words in ("words → letters", "letters → words", "own.txt", "floor", "1:1", "commonest spans that differ"):
        assert words in shown
    card, picture = (Path(line) for line in shown.splitlines()[-2:])
    assert json.loads(card.read_text())["directions"][0]["coverage"]["own.txt"]["rows"] == 1
    assert picture.read_text().startswith("<svg ")


def test_show_draws_both_segmentations(pair, capsys):
    """One line per tokenizer, bars inside common spans, and a count."""
    assert main(["align", "show", *pair, "reverse: yah"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("words ")
    assert "reverse" in first
    assert "r|e|v|e|r|s|e" in second
    assert "common spans" in last


def test_common_spans_stand_below_each_other():
    """Both lines give every span the same width, and only spans that differ are red."""
    spans = [SpanText((b"12",), (b"1", b"2")), SpanText((b" x",), (b" x",))]
    first, second = segmentations(spans)
    assert (first.plain, second.plain) == ("12  ·x ", "1|2 ·x ")
    assert [str(part.style) for part in second.spans] == ["white on red", "black on bright_yellow"]


@pytest.mark.parametrize("name", ["ranks.tiktoken", "missing.json"])
def test_what_is_no_tokenizer_is_refused(pair, name: str, tmp_path: Path, capsys):
    """One line that says what was wanted."""
    (tmp_path / "ranks.tiktoken").write_text("IQ== 0\n")
    assert main(["align", "show", pair[0], str(tmp_path / name), "x"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("mrl: error: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\xff"], ids=["empty", "bytes"])
def test_an_unusable_text_is_refused(pair, content: bytes, tmp_path: Path, capsys):
    """A file without text is a mistake, not an empty card."""
    (tmp_path / "t").write_bytes(content)
    assert main(["align", "card", *pair, "--text", str(tmp_path / "t"), "--out", str(tmp_path)]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_refused_kind_says_why(pair, tmp_path: Path, capsys):
    """WordPiece cannot be aligned exactly."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert main(["align", "card", pair[0], str(tmp_path)]) == 2
    assert "cannot be aligned exactly" in capsys.readouterr().err
