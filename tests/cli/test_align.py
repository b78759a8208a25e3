"""`mrl align`: the card and the two segmentations."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from tokenizers import Tokenizer, decoders, models, normalizers

from mrl.alignment.exact_tries import NotMeasurable
from mrl.alignment.pair_card import SpanText
from mrl.cli.align_show import changes, visible, wrapped
from mrl.cli.main import main
from tests.support.model_folders import write_byte_level

TEXT = "reverse: yah sun nus hay lamp pmal 12 + 34 = 46\n"


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    """Floors from fewer texts: what is asked here does not depend on their number."""
    monkeypatch.setattr("mrl.alignment.pair_card.FLOOR_TEXTS", 200)


def byte_level(folder: Path, size: int, normalizer: normalizers.Normalizer | None = None) -> str:
    """A model folder with a byte-level tokenizer of `size` tokens."""
    return str(write_byte_level(folder, [TEXT] * 9, size, normalizer=normalizer))


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[str, str]:
    """Two model folders: a tokenizer that merges, and one that cuts letters apart."""
    root = tmp_path_factory.mktemp("pair")
    return byte_level(root / "words", 400), byte_level(root / "letters", 257)


@pytest.fixture(scope="session")
def nfc(tmp_path_factory) -> str:
    """A model folder whose tokenizer puts text into NFC."""
    return byte_level(tmp_path_factory.mktemp("normal") / "nfc", 400, normalizers.NFC())


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory) -> str:
    """A model folder of a kind that is refused."""
    folder = tmp_path_factory.mktemp("refused") / "wordpiece"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def card_of(words: list[str], out: Path, capsys) -> tuple[str, dict]:
    """What the command shows, and the card that it names last."""
    assert main(["align", "card", *words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    return shown, json.loads(Path(shown.splitlines()[-1]).read_text())


def test_card_prints_and_saves(pair, tmp_path: Path, capsys):
    """Coverage of the given text, the floor, and a file whose path is printed last."""
    text = tmp_path / "own.txt"
    text.write_text(TEXT)
    shown, card = card_of([*pair, "--text", str(text), "--only-text"], tmp_path / "cards", capsys)
    for words in ("words → letters", "letters → words", "own.txt", "floor", "1:1", "most frequent spans that differ"):
        assert words in shown
    assert {kind: figures["rows"] for kind, figures in card["directions"][0]["coverage"].items()} == {"own.txt": 1}
    assert card["refusals"] == {}


def test_own_texts_stand_beside_the_built_in_ones(pair, tmp_path: Path, capsys, monkeypatch):
    """Files add to the kinds, bytes and all; one named as a kind or as another file stands under its whole path."""
    monkeypatch.setattr("mrl.cli.align.card_texts", lambda: {"math": ["1 + 1 = 2"], "prose": ["a tale"]})
    (tmp_path / "math").write_bytes(b"2 + 2\r\n= 4")
    (tmp_path / "own").write_text(TEXT)
    files = [str(tmp_path / "math"), str(tmp_path / "own")]
    _, card = card_of([*pair, "--text", files[0], "--text", files[1]], tmp_path, capsys)
    coverage = card["directions"][0]["coverage"]
    assert list(coverage) == ["math", "prose", files[0], "own"]
    assert coverage[files[0]]["bytes"] == len(b"2 + 2\r\n= 4")


def test_only_text_needs_a_text(pair, tmp_path: Path, capsys):
    """Nothing is left of a card without the built-in kinds and without a file."""
    assert main(["align", "card", *pair, "--only-text", "--out", str(tmp_path)]) == 2
    assert "--text FILE" in capsys.readouterr().err


def test_a_refused_tokenizer_stands_in_the_card(pair, wordpiece, tmp_path: Path, capsys):
    """The card is made and names it with the reason, on the terminal and in JSON."""
    shown, card = card_of([pair[0], wordpiece], tmp_path, capsys)
    assert list(card["refusals"]) == ["wordpiece"]
    assert "WordPiece" in card["refusals"]["wordpiece"]
    assert card["directions"] == []
    assert card["fingerprints"][0] != card["fingerprints"][1] == ""
    assert f"refused: wordpiece: {card['refusals']['wordpiece']}" in shown


def test_a_floor_that_cannot_be_measured_is_told(pair, tmp_path: Path, capsys, monkeypatch):
    """The table of floors gives way to a line with the reason."""
    why = NotMeasurable("letters: 3 of 9 texts are not tokenized like their single words")
    monkeypatch.setattr("mrl.alignment.pair_card.pair_floors", lambda *_: (why, why))
    (tmp_path / "own").write_text(TEXT)
    shown, card = card_of([*pair, "--text", str(tmp_path / "own"), "--only-text"], tmp_path, capsys)
    assert f"floor words → letters: not measurable, {why.reason}" in shown
    assert card["directions"][1]["floor"] == {"not_measurable": why.reason}


def test_show_draws_both_segmentations(pair, capsys):
    """One line per tokenizer, bars inside common spans, and a count; colours are named only where they are."""
    assert main(["align", "show", *pair, "reverse: yah"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("words ")
    assert "reverse" in first
    assert "r|e|v|e|r|s|e" in second
    assert "common spans" in last
    assert "red" not in last
    assert main(["align", "show", *pair, "reverse: yah", "--color"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[37;41mreverse" in coloured
    assert "red: different tokens" in coloured


def test_show_says_what_a_receiver_in_nfc_changed(pair, nfc, capsys):
    """The receiver's text stands below the peer's, and a line names the characters that changed."""
    assert main(["align", "show", pair[0], nfc, "cafe\u0301 yah"]) == 0
    note, first, second, last = capsys.readouterr().out.splitlines()
    assert note == "nfc changes characters of words's text (NFC): e\u0301 [U+0065 U+0301] became \u00e9 [U+00E9]"
    assert "\\xcc" in first
    assert "yah" in second.replace("|", "")
    assert "\\xc3" in second
    assert "common spans" in last


def test_show_says_what_a_peer_writes_otherwise(pair, nfc, capsys):
    """A peer that puts text into NFC never wrote what was given."""
    assert main(["align", "show", nfc, pair[0], "cafe\u0301"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nfc changes characters of the given text (NFC): e\u0301 [U+0065 U+0301] became")
    assert not any("reads other" in line for line in lines)


def test_show_says_why_a_text_is_rejected(pair, capsys):
    """The reason in words."""
    assert main(["align", "show", *pair, ""]) == 0
    assert capsys.readouterr().out == "letters cannot express this text: empty, the text is empty\n"


def test_shared_spans_stand_below_each_other():
    """Both lines give every span the same cells, wide characters too; red differs in tokens, magenta in characters."""
    spans = [
        SpanText((b"12",), (b"1", b"2")),
        SpanText((b" x",), (b" x",)),
        SpanText(("\u6f22".encode(), "\u5b57".encode()), ("\u6f22\u5b57".encode(),)),
        SpanText((b"e", "\u0301".encode()), ("\u00e9".encode(),)),
    ]
    ((first, second),) = wrapped(spans, 80)
    assert (first.plain, second.plain) == ("12  ·x \u6f22|\u5b57 e|\u25cc\u0301 ", "1|2 ·x \u6f22\u5b57  \u00e9   ")
    assert cell_len(first.plain) == cell_len(second.plain)
    styles = ["white on red", "black on bright_yellow", "white on red", "black on bright_magenta"]
    assert [str(part.style) for part in second.spans] == styles


def test_long_texts_are_shown_in_lines():
    """No line is wider than the terminal, no span is lost, one that is too wide stands alone."""
    spans = [SpanText((word,), (word,)) for word in (b"one", b"two", b"three", b"a" * 30, b"four")]
    lines = [first.plain for first, _ in wrapped(spans, 10)]
    assert lines == ["one two ", "three ", "a" * 30 + " ", "four "]
    assert list(wrapped([], 10)) == []


def test_many_changes_are_cut_short():
    """What changed is named piece by piece."""
    assert changes("a\u2581b", "a b") == [("\u2581", " ")]
    assert changes("x\u00bd", "x") == [("\u00bd", "")]
    assert changes("same", "same") == []


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


def test_a_refused_kind_says_why(pair, wordpiece, capsys):
    """WordPiece cannot be aligned exactly, so there is nothing to show."""
    assert main(["align", "show", pair[0], wordpiece, "x"]) == 2
    assert "cannot be aligned exactly" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" yah\n", "·yah⏎"),
        (b"\xf0\x9f", "\\xf0\\x9f"),
        (b" x\xf0", "·x\\xf0"),
        ("\u200d".encode(), "\\u200d"),
        ("é".encode(), "é"),
        ("e\u0301".encode(), "e\u0301"),
        ("\u0301".encode(), "\u25cc\u0301"),
        (b"", ""),
    ],
)
def test_tokens_are_made_visible(data, shown):
    """Spaces and line ends are marked, what is no character is shown in hexadecimal."""
    assert visible(data) == shown
