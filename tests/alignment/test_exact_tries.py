"""One policy through two tokenizers: the log-ratio of a text is 0, that of a span is not."""

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest

from mrl.alignment.exact_tries import (
    EOS_ID,
    NotMeasurable,
    TracedTexts,
    Word,
    WordDistribution,
    measure_floor,
    outside_share,
    span_residuals,
    trace_texts,
)

WORDS = ("sun", "sunset", "sunsets", "hay", "1", "12", "123", "129", "a")


def by(pattern: str) -> Callable[[tuple[str, ...] | list[str]], list[Word]]:
    """A tokenizer that cuts text by a regular expression; an id is the piece itself, as a number."""

    def cut(texts) -> list[Word]:
        pieces = [re.findall(pattern, text) for text in texts]
        return [[(int.from_bytes(piece.encode()), len(piece.encode())) for piece in row] for row in pieces]

    return cut


WHOLE, LETTERS, HALVES = by(r" ?[a-z]+|\d| "), by(r"."), by(r" ?sun|[a-z]+|\d{1,3}| ")


@pytest.fixture
def source() -> WordDistribution:
    probabilities = np.arange(1.0, len(WORDS) + 1)
    return WordDistribution(WORDS, probabilities / probabilities.sum(), end_probability=1 / 12)


def traced_by(source: WordDistribution, cut, words: np.ndarray, offsets: np.ndarray) -> TracedTexts:
    """The trace, which these tokenizers have."""
    traced = trace_texts(source, cut, words, offsets)
    assert isinstance(traced, TracedTexts)
    return traced


def expected(source: WordDistribution, words: np.ndarray, offsets: np.ndarray) -> list[float]:
    """log P of every text from the definition of the source."""
    logs = np.log(source.probabilities)[words]
    lengths = np.diff(offsets)
    go, stop = np.log(1 - source.end_probability), np.log(source.end_probability)
    parts = [logs[a:b].sum() for a, b in itertools.pairwise(offsets)]
    return [part + (n - 1) * go + stop for part, n in zip(parts, lengths, strict=True)]


@pytest.mark.parametrize("cut", [WHOLE, LETTERS, HALVES], ids=["whole", "letters", "halves"])
def test_tokens_of_a_text_multiply_to_its_probability(source, cut):
    """Whatever the tokenizer, the log-probs of a text's tokens sum to the log-prob of the text."""
    drawn, offsets = source.sample(200, np.random.default_rng(0))
    traced = traced_by(source, cut, drawn, offsets)
    sums = [traced.logprobs[a:b].sum() for a, b in zip(traced.offsets[:-1], traced.offsets[1:], strict=True)]
    np.testing.assert_allclose(sums, expected(source, drawn, offsets), atol=1e-9)
    assert traced.logprobs.max() <= 1e-12


def test_next_token_probabilities_sum_to_one(source):
    """After the letters of "sun" come the next letter, a space or the end, with probabilities that sum to 1."""
    index = {word: number for number, word in enumerate(WORDS)}

    def chance(words: list[str], token: int) -> float:
        traced = traced_by(source, LETTERS, np.array([index[word] for word in words]), np.array([0, len(words)]))
        return float(np.exp(traced.logprobs[token]))

    total = chance(["sunset"], 3) + chance(["sun", "a"], 3) + chance(["sun"], 3)
    assert total == pytest.approx(1.0, abs=1e-12)


def test_sequence_log_ratio_is_zero(source):
    """Over a finished text the two tokenizers agree to 1e-9, though single spans differ by tenths of a nat."""
    drawn, offsets = source.sample(500, np.random.default_rng(1))
    whole, halves = (traced_by(source, cut, drawn, offsets) for cut in (WHOLE, HALVES))
    floor = measure_floor(whole, halves)
    assert floor.max_sequence_nats < 1e-9
    assert floor.span_std_nats > 0.1
    assert floor.one_to_one_std_nats > 0.1
    assert floor.outside_narrow >= floor.outside_wide > 0


def test_residual_telescopes(source):
    """The sum over many spans spreads no more than that over few; independent residuals would grow as the root."""
    drawn, offsets = source.sample(3000, np.random.default_rng(2))
    whole, halves = (traced_by(source, cut, drawn, offsets) for cut in (WHOLE, HALVES))
    floor = measure_floor(whole, halves)
    assert floor.cumulative_std[20] < 1.5 * floor.cumulative_std[5]
    assert floor.cumulative_std[20] < 0.5 * floor.independent_std[20]


def test_residual_at_a_boundary_does_not_depend_on_the_path(source):
    """R after "sun" is one number, whatever words came before it."""
    index = {word: number for number, word in enumerate(WORDS)}
    texts = [["hay", "sun", "a"], ["123", "a", "sunsets", "sun", "a"], ["1", "sun", "a"]]
    words = np.array([index[word] for text in texts for word in text])
    offsets = np.cumsum([0, *map(len, texts)])
    spans = span_residuals(*(traced_by(source, cut, words, offsets) for cut in (WHOLE, HALVES)))
    # Every text ends with the spans " sun", " a" and EOS.
    after_sun = [spans.cumulative[end - 3] for end in spans.offsets[1:]]
    assert after_sun[0] != 0
    np.testing.assert_allclose(after_sun, after_sun[0], atol=1e-12)


def test_one_tokenizer_has_no_residual(source):
    """Both sides cut alike: every span is 1:1 and 0."""
    drawn, offsets = source.sample(50, np.random.default_rng(3))
    traced = traced_by(source, WHOLE, drawn, offsets)
    floor = measure_floor(traced, traced)
    assert floor.span_std_nats == floor.max_sequence_nats == floor.outside_narrow == 0


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
    pieces = by(pattern)

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
