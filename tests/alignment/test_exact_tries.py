"""One policy through two tokenizers: the log-ratio of a text is 0, that of a span is not."""

import numpy as np
import pytest

from mrl.alignment.exact_tries import (
    EOS_ID,
    NotMeasurable,
    TracedTexts,
    WordDistribution,
    outside_share,
    trace_texts,
)
from tests.support.alignment_properties.policies_over_bytes import WORDS, cut_by

HALVES = cut_by(r" ?sun|[a-z]+|\d{1,3}| ")


@pytest.fixture
def source() -> WordDistribution:
    probabilities = np.arange(1.0, len(WORDS) + 1)
    return WordDistribution(WORDS, probabilities / probabilities.sum(), end_probability=1 / 12)


def traced_by(source: WordDistribution, cut, words: np.ndarray, offsets: np.ndarray) -> TracedTexts:
    """The trace, which these tokenizers have."""
    traced = trace_texts(source, cut, words, offsets)
    assert isinstance(traced, TracedTexts)
    return traced


def test_tokens_are_those_of_the_whole_text(source):
    """The trace holds the ids and widths that the tokenizer gives to the text as a whole, and an EOS behind each."""
    drawn, offsets = source.sample(20, np.random.default_rng(4))
    traced = traced_by(source, HALVES, drawn, offsets)
    for row, text in enumerate(source.texts(drawn, offsets)):
        mine = slice(*traced.offsets[row : row + 2])
        pairs = list(zip(traced.token_ids[mine].tolist(), traced.widths[mine].tolist(), strict=True))
        assert pairs == [*HALVES([text])[0], (EOS_ID, 1)]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r".. ?|.", "words share a token with the word before them"),
        (r" ?sun(?= hay)|[a-z]+|\d| ", "texts are not tokenized like their single words"),
        (r"sun hay|[a-z]+|\d| ", "texts are not tokenized like their single words"),
        (r"[a-z ]+", "words cannot be written exactly"),
    ],
    ids=["over_the_end", "by_what_follows", "two_words", "no_digits"],
)
def test_words_that_depend_on_their_neighbours_have_no_floor(source, pattern, why):
    """A tokenizer that cuts a word in a text otherwise than alone gets a reason, not a figure."""
    pieces = cut_by(pattern)

    def cut(texts):
        rows = zip(texts, pieces(texts), strict=True)
        return [row if sum(width for _, width in row) == len(text) else [] for text, row in rows]

    drawn, offsets = source.sample(300, np.random.default_rng(5))
    refused = trace_texts(source, cut, drawn, offsets)
    assert isinstance(refused, NotMeasurable)
    assert why in refused.reason


def test_outside_share():
    """Both edges count as inside."""
    assert outside_share(np.array([0.5, 0.8, 1.0, 1.2, 1.3]), (0.8, 1.2)) == pytest.approx(0.4)
    assert outside_share(np.array([]), (0.8, 1.2)) == 0
