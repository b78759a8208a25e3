"""The picture of a pair card."""

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from mrl.alignment.exact_tries import Floor, NotMeasurable
from mrl.alignment.pair_card import Coverage, CutExample, Direction, PairCard, SpanText
from mrl.report.card_picture import card_picture, visible

SHARE = {"one_to_one": 0.7, "one_to_many": 0.2, "many_to_one": 0.06, "many_to_many": 0.04}
FLOOR = Floor(10, 100, 2e-12, 0.2, 0.18, 0.31, 0.074, 0.015, {5: 0.1, 20: 0.11}, {5: 0.4, 20: 0.9})


def make_card(*, same: bool = False) -> PairCard:
    coverage = Coverage(3, 90, SHARE, 0.72, 1.05, 1.1, 3.2, 2, 4, {"bytes_differ": 2}, {})
    directions = (Direction("a", "<b>", {"math": coverage}, FLOOR), Direction("<b>", "a", {"math": coverage}, FLOOR))
    example = CutExample(SpanText((b"1", b"2"), (b"12",)), 7, "math")
    return PairCard(("a", "<b>"), ("x", "x" if same else "y"), directions, (example,))


def refused_card() -> PairCard:
    return PairCard(("a", "b"), ("x", ""), (), (), {"b": "t5/tokenizer.json: <no> kind of ours; " + "why " * 60})


def texts_of(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_picture_is_one_svg_that_says_everything():
    """Both directions, shares, lengths, rejections, the floor and the examples; names are escaped."""
    texts = texts_of(card_picture(make_card()))
    for words in (
        "a and <b>",
        "a → <b>",
        "<b> → a",
        "math",
        "70.0",
        "20.0",
        "1.050",
        "2 of 3",
        "7 times in math",
        "12",
    ):
        assert words in texts
    assert any("0.18 nats where 1:1, 0.31 elsewhere" in text for text in texts)
    assert any("7.4 %" in text for text in texts)


def test_bars_fill_the_width():
    """The four parts of a bar stand side by side and end where its frame ends."""
    root = ElementTree.fromstring(card_picture(make_card()))
    rects = [element.attrib for element in root.iter() if element.tag.endswith("rect")]
    frame = next(rect for rect in rects if rect.get("class") == "empty")
    parts = [rect for rect in rects if rect.get("class") in SHARE and rect.get("height") == "21"][:4]
    assert sum(float(part["width"]) for part in parts) == pytest.approx(float(frame["width"]), abs=0.3)
    assert float(parts[0]["x"]) == pytest.approx(float(frame["x"]), abs=0.1)
    for left, right in itertools.pairwise(parts):
        assert float(left["x"]) + float(left["width"]) == pytest.approx(float(right["x"]), abs=0.2)


def test_picture_of_one_tokenizer_says_so():
    """Nothing to compare."""
    assert any("One tokenizer" in text for text in texts_of(card_picture(make_card(same=True))))


def test_picture_of_a_refused_tokenizer_gives_the_reason():
    """All words of it, in lines that fit."""
    texts = texts_of(card_picture(refused_card()))
    assert "Cannot be aligned exactly" in texts
    told = " ".join(texts[2:])
    assert told.startswith("b: t5/tokenizer.json: <no> kind of ours; why")
    assert told.count("why") == 60
    assert max(map(len, texts)) <= 140


def test_picture_without_a_floor_gives_the_reason():
    """Where the figure would stand."""
    card = make_card()
    why = NotMeasurable("b: 3 of 9 texts are not cut as their words are alone")
    card = replace(card, directions=tuple(replace(direction, floor=why) for direction in card.directions))
    texts = texts_of(card_picture(card))
    assert texts.count(f"not measurable: {why.reason}") == 2
    assert not any("nats where 1:1" in text for text in texts)


def test_long_names_of_texts_are_cut():
    """The name of a file does not run into its bar."""
    card = make_card()
    coverage = {"a_file_with_a_long_name.txt": card.directions[0].coverage["math"]}
    card = replace(card, directions=tuple(replace(direction, coverage=coverage) for direction in card.directions))
    assert "a_file_with_…" in texts_of(card_picture(card))


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
