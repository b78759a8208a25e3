"""Pair cards."""

import json

import pytest

from mrl.alignment.card_text import card_texts, rows_of, word_frequencies
from mrl.alignment.pair_card import PairCard, make_card, span_texts, translated, written_by
from mrl.alignment.receiver import Receiver, load_receiver

ROWS = {
    "plain": ["reverse: yah 12 + 34\n", "sun nus hay lamp" + 20 * "\nx"],
    "odd": ["a\u2581b", "caf\u00e9 \U0001f469"],
}


@pytest.fixture(scope="module")
def receivers(folders) -> tuple[Receiver, Receiver]:
    return load_receiver(folders["byte_level"]), load_receiver(folders["metaspace_prepend"])


@pytest.fixture(scope="module")
def card(receivers) -> PairCard:
    return make_card(("bytes", "meta"), receivers, ROWS)


def test_card_names_what_is_rejected(card):
    """Only the receiver with the metaspace mark refuses it, and the card says why."""
    forth, back = card.directions
    assert (forth.peer, forth.receiver) == ("bytes", "meta")
    assert (back.peer, back.receiver) == ("meta", "bytes")
    assert forth.coverage["odd"].rejected == {"bytes_differ": 1}
    assert back.coverage["odd"].rejected == {}
    assert forth.coverage["plain"].rejected == {}


def test_directions_mirror_each_other(card):
    """Seen from the other side splits are merges, the length ratio is the inverse, and 1:1 bytes are the same."""
    forth, back = (direction.coverage["plain"] for direction in card.directions)
    assert forth.length_ratio == pytest.approx(1 / back.length_ratio)
    assert forth.one_to_one_byte_share == back.one_to_one_byte_share
    assert (forth.share["one_to_many"] > 0) == (back.share["many_to_one"] > 0)
    assert sum(forth.share.values()) == pytest.approx(1.0)


def test_floor_is_exact_and_not_zero(card):
    """Over whole texts one policy agrees with itself; over spans tokenizers alone make a difference."""
    for direction in card.directions:
        assert direction.floor.max_sequence_nats < 1e-9
        assert direction.floor.span_std_nats > 0


def test_spans_join_to_the_text_on_both_sides(receivers):
    """What a card shows of a text is the whole text, cut in two ways with common ends."""
    texts = ["reverse: yah 12 + 34\n", "caf\u00e9 \U0001f469", "\nQ"]
    answers, batch = translated(*receivers, texts)
    assert not batch.token_bytes.all(), "a dummy prefix that is a token of its own"
    for row, text in enumerate(texts):
        spans = span_texts(answers[row], batch, row)
        assert b"".join(piece for span in spans for piece in span.peer) == text.encode()
        assert all(b"".join(span.peer) == b"".join(span.receiver) for span in spans)
        assert spans


def test_examples_differ_and_come_often(card):
    """An example is a span that the two cut differently."""
    assert card.examples
    for example in card.examples:
        assert not example.span.is_one_to_one
        assert b"".join(example.span.peer) == b"".join(example.span.receiver)
        assert example.count >= 1


def test_card_is_json(card):
    """Everything on it survives the trip."""
    content = json.loads(json.dumps(card.to_json()))
    assert content["names"] == ["bytes", "meta"]
    assert content["directions"][0]["coverage"]["odd"]["rejected"] == {"bytes_differ": 1}
    assert "".join(content["examples"][0]["peer"]) == "".join(content["examples"][0]["receiver"]) != ""


def test_one_tokenizer_is_an_identity(receivers):
    """A pair of equal tokenizers has all tokens 1:1 and no floor."""
    card = make_card(("a", "b"), (receivers[0], receivers[0]), {"plain": ROWS["plain"]})
    assert card.is_identity
    assert card.directions[0].coverage["plain"].share["one_to_one"] == 1.0
    assert card.directions[0].floor.span_std_nats == 0.0


def test_peer_writes_what_its_normalizer_makes_of_a_text(folders):
    """A peer with NFC would never have written a decomposed character."""
    (answer,) = written_by(load_receiver(folders["byte_level_nfc"]), ["cafe\u0301"])
    assert answer.completion == "caf\u00e9".encode()
    assert answer.byte_lengths.sum() == len(answer.completion)


def test_built_in_texts_are_the_same_on_every_call():
    """Cards of two runs can be compared."""
    assert card_texts() == card_texts()
    assert set(card_texts()) == {"math", "prose", "code", "multilingual", "adversarial"}
    assert all(rows and all(rows) for rows in card_texts().values())


def test_long_texts_are_cut_at_line_ends():
    """Rows join to the text, none is empty, and a short text is one row."""
    text = "a line of text\n" * 300
    rows = rows_of(text)
    assert "".join(rows) == text
    assert len(rows) > 2
    assert all(row.endswith("\n") for row in rows)
    assert rows_of("short") == ["short"]
    assert rows_of("") == []


def test_words_have_frequencies_that_sum_to_one():
    """Numbers make up the share that was asked for; no word stands twice."""
    words, frequencies = word_frequencies(num_words=500, number_share=0.12)
    assert len(set(words)) == len(words) == len(frequencies)
    assert sum(frequencies) == pytest.approx(1.0)
    assert sum(f for w, f in zip(words, frequencies, strict=True) if w.isdigit()) == pytest.approx(0.12)
