"""Pair cards."""

import json

import numpy as np
import pytest

from mrl.alignment import pair_card
from mrl.alignment.card_text import card_texts, rows_of, word_frequencies
from mrl.alignment.exact_tries import Floor, NotMeasurable
from mrl.alignment.pair_card import (
    PairCard,
    make_card,
    pair_floors,
    written_by,
)
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.errors import TokenizerRefused
from tests.support.model_folders import write_byte_level

ROWS = {
    "plain": ["reverse: yah 12 + 34\n", "sun nus hay lamp" + 20 * "\nx"],
    "odd": ["a\u2581b", "caf\u00e9 \U0001f469"],
}


@pytest.fixture(scope="module", autouse=True)
def few_texts():
    """Floors from fewer texts: what is asked here does not depend on their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_card, "FLOOR_TEXTS", 200)
        yield


@pytest.fixture(scope="module")
def receivers(receiver_of) -> tuple[Receiver, Receiver]:
    return receiver_of("byte_level"), receiver_of("metaspace_prepend")


@pytest.fixture(scope="module")
def byte_pair(receiver_of, tmp_path_factory) -> tuple[Receiver, Receiver]:
    """Two that never join words: a byte-level one, and one that knows other pieces."""
    corpus = ["the statement is true if the value of an expression is 10 or 100"] * 9
    return receiver_of("byte_level"), load_receiver(write_byte_level(tmp_path_factory.mktemp("other"), corpus, 320))


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


def test_floor_is_exact_and_not_zero(byte_pair):
    """Over whole texts one policy agrees with itself; over spans tokenizers alone make a difference."""
    for direction in make_card(("one", "other"), byte_pair, ROWS).directions:
        assert isinstance(direction.floor, Floor)
        assert direction.floor.max_sequence_nats < 1e-9
        assert direction.floor.span_std_nats > 0


def test_floors_of_the_two_directions_mirror_each_other(byte_pair):
    """Seen from the other side every log-ratio changes its sign: spreads are equal, shares outside a band are not."""
    forth, back = pair_floors(("one", "other"), byte_pair, np.random.default_rng(0))
    assert isinstance(forth, Floor)
    assert isinstance(back, Floor)
    assert forth.span_std_nats == pytest.approx(back.span_std_nats)
    assert forth.cumulative_std == pytest.approx(back.cumulative_std)
    assert forth.outside_narrow != back.outside_narrow


def test_a_tokenizer_that_joins_words_has_no_floor(card):
    """Pieces of the metaspace tokenizer reach over spaces: the card says so, and names the side, in both directions."""
    for direction in card.directions:
        assert isinstance(direction.floor, NotMeasurable)
        assert direction.floor.reason.startswith("meta: ")
    written = json.loads(json.dumps(card.to_json()))["directions"][0]["floor"]
    assert written == {"not_measurable": card.directions[0].floor.reason}


def test_a_refused_tokenizer_makes_a_card(receivers):
    """The card has its reason, the fingerprint of the other, and nothing that was not measured."""
    refusal = TokenizerRefused("no kind of ours", where="there", got="WordPiece")
    card = make_card(("a", "b"), (receivers[0], refusal), ROWS)
    assert card.refusals == {"b": "there: no kind of ours; got 'WordPiece'"}
    assert card.fingerprints == (receivers[0].fingerprint, "")
    assert card.directions == card.examples == ()
    assert json.loads(json.dumps(card.to_json()))["refusals"] == card.refusals
    both = make_card(("a", "b"), (refusal, refusal), ROWS)
    assert set(both.refusals) == {"a", "b"}
    assert not both.is_identity


def test_examples_differ_and_come_often(card):
    """An example is a span that the two cut differently."""
    assert card.examples
    for example in card.examples:
        assert not example.span.is_one_to_one
        assert b"".join(example.span.peer) == b"".join(example.span.receiver)
        assert example.count >= 1


def test_an_example_stands_where_it_comes_most_often(byte_pair):
    """A span that two kinds of text share is shown once, with the kind that has more of it."""
    rows = {"few": ["x reverse"], "many": ["x reverse reverse"], "last": ["x reverse reverse"]}
    examples = make_card(("one", "other"), byte_pair, rows).examples
    spans = [example.span for example in examples]
    assert len(set(spans)) == len(spans)
    assert {example.kind for example in examples} == {"many"}


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


def test_peer_writes_what_its_normalizer_makes_of_a_text(receiver_of):
    """A peer with NFC would never have written a decomposed character."""
    (answer,) = written_by(receiver_of("byte_level_nfc"), ["cafe\u0301"])
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
    words, frequencies = word_frequencies(num_words=500)
    assert len(set(words)) == len(words) == len(frequencies)
    assert sum(frequencies) == pytest.approx(1.0)
    assert sum(f for w, f in zip(words, frequencies, strict=True) if w.isdigit()) == pytest.approx(0.12)
