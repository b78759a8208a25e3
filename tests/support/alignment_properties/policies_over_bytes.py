"""A policy over bytes seen through two tokenizers: `exact_tries` against sums over all words."""

import dataclasses
import itertools
import math
import re
from functools import partial
from random import Random

import numpy as np

from mrl.alignment.exact_tries import Floor, NotMeasurable, WordDistribution, measure_floor, span_residuals, trace_texts
from mrl.alignment.pair_card import cut_words
from tests.support.alignment_properties.kinds import KINDS
from tests.support.alignment_properties.raising import never_raises

WORDS = ("sun", "sunset", "sunsets", "hay", "1", "12", "123", "129", "a")
PATTERNS = {
    "whole": r" ?[a-z]+|\d| ",
    "letters": r".",
    "halves": r" ?sun|[a-z]+|\d{1,3}| ",
    "pairs": r" |[a-z]{1,2}|\d\d?",
}


def cut_by(pattern: str):
    """Make a tokenizer that cuts text by a regular expression; an id is the piece itself, as a number."""

    def cut(texts):
        rows = [re.findall(pattern, text) for text in texts]
        return [[(int.from_bytes(piece.encode()), len(piece.encode())) for piece in row] for row in rows]

    return cut


def make_source(random: Random) -> WordDistribution:
    """Make a distribution of the words with random probabilities."""
    weights = np.array([random.random() + 0.05 for _ in WORDS])
    return WordDistribution(WORDS, weights / weights.sum(), end_probability=1 / 12)


def pieces_of(pattern: str, word: str, *, is_first: bool) -> list[str]:
    """Return the tokens of a word, with the space before it unless it opens the text."""
    return re.findall(pattern, word if is_first else " " + word)


def slow_logprob(source: WordDistribution, pattern: str, words: list[str], position: int, depth: int) -> float:
    """Return log p of the token at `depth` of the word at `position`, or of the EOS behind the last word.

    It sums over all words that begin as the text does, straight from the definition of the source.
    """
    chances = dict(zip(source.words, source.probabilities.tolist(), strict=True))

    def mass(at: int, prefix: list[str]) -> float:
        cuts = {word: pieces_of(pattern, word, is_first=at == 0) for word in chances}
        return sum(chances[word] for word, cut in cuts.items() if cut[: len(prefix)] == prefix)

    def ended(at: int) -> float:
        return chances[words[at]] / mass(at, pieces_of(pattern, words[at], is_first=at == 0))

    if position == len(words):
        return math.log(ended(position - 1) * source.end_probability)
    own = pieces_of(pattern, words[position], is_first=position == 0)
    chance = mass(position, own[: depth + 1]) / mass(position, own[:depth])
    if depth == 0 and position > 0:
        chance *= ended(position - 1) * (1 - source.end_probability)
    return math.log(chance)


def check_tries_give_the_sums_over_all_words(receivers, random: Random) -> None:
    """Each token's log-probability is the sum over the words that begin so; widths are bytes, 1 for the EOS."""
    source = make_source(random)
    texts = [[random.choice(WORDS) for _ in range(random.randint(1, 5))] for _ in range(6)]
    drawn = np.array([WORDS.index(word) for text in texts for word in text])
    offsets = np.array([0, *itertools.accumulate(map(len, texts))])
    for pattern in PATTERNS.values():
        traced = trace_texts(source, cut_by(pattern), drawn, offsets)
        assert not isinstance(traced, NotMeasurable)
        expected, widths, ends = [], [], [0]
        for text in texts:
            for position, word in enumerate(text):
                own = pieces_of(pattern, word, is_first=position == 0)
                widths += map(len, own)
                expected += [slow_logprob(source, pattern, text, position, depth) for depth in range(len(own))]
            expected.append(slow_logprob(source, pattern, text, len(text), 0))
            widths.append(1)
            ends.append(len(widths))
        assert traced.offsets.tolist() == ends
        assert traced.widths.tolist() == widths
        assert np.allclose(traced.logprobs, expected, rtol=0, atol=1e-9)


def check_whole_texts_have_no_residual(receivers, random: Random) -> None:
    """Over a finished text every two tokenizers agree to 1e-9, though only equal ones agree on spans."""
    source = make_source(random)
    drawn, offsets = source.sample(150, np.random.default_rng(random.getrandbits(32)))
    assert offsets[0] == 0
    assert (np.diff(offsets) >= 1).all()
    traces = {name: trace_texts(source, cut_by(pattern), drawn, offsets) for name, pattern in PATTERNS.items()}
    for one, other in itertools.product(traces, traces):
        floor = measure_floor(traces[one], traces[other])
        assert floor.max_sequence_nats < 1e-9
        assert (floor.span_std_nats == 0) == (one == other)
        expect_floor(floor, span_residuals(traces[one], traces[other]))
        noise = np.array([-random.random() for _ in traces[one].logprobs])
        noisy = span_residuals(dataclasses.replace(traces[one], logprobs=noise), traces[other])
        for start, end in itertools.pairwise(noisy.offsets.tolist()):
            assert np.allclose(noisy.cumulative[start:end], np.cumsum(noisy.nats[start:end]), rtol=0, atol=1e-9)


def expect_floor(floor: Floor, spans) -> None:
    """Check the figures of a floor against its spans, one after the other."""
    nats = spans.nats.tolist()
    lone = [
        value for value, *sizes in zip(nats, spans.peer_tokens, spans.receiver_tokens, strict=True) if sizes == [1, 1]
    ]
    other = [
        value for value, *sizes in zip(nats, spans.peer_tokens, spans.receiver_tokens, strict=True) if sizes != [1, 1]
    ]
    assert (floor.spans, floor.texts) == (len(nats), len(spans.offsets) - 1)
    for found, values in (
        (floor.span_std_nats, nats),
        (floor.one_to_one_std_nats, lone),
        (floor.other_std_nats, other),
    ):
        assert math.isclose(found, float(np.std(values)) if values else 0.0, abs_tol=1e-12)
    for found, (low, high) in ((floor.outside_narrow, (0.8, 1.2)), (floor.outside_wide, (0.5, 2.0))):
        outside = [not math.log(low) <= value <= math.log(high) for value in nats]
        assert math.isclose(found, sum(outside) / len(outside), abs_tol=1e-12)
    starts = spans.offsets.tolist()
    rows = [nats[start:end] for start, end in itertools.pairwise(starts)]
    for count, found in floor.cumulative_std.items():
        reached = [sum(row[:count]) for row in rows if len(row) > count]
        assert math.isclose(found, float(np.std(reached)), abs_tol=1e-9)
        assert math.isclose(floor.independent_std[count], floor.span_std_nats * math.sqrt(count))


def check_the_residual_at_a_boundary_does_not_depend_on_the_path(receivers, random: Random) -> None:
    """After the same last word the cumulative residual is one number, whatever was said before it."""
    source = make_source(random)
    differing = 0
    for word in WORDS:
        texts = [[*(random.choice(WORDS) for _ in range(random.randint(1, 6))), word, "a"] for _ in range(5)]
        drawn = np.array([WORDS.index(one) for text in texts for one in text])
        offsets = np.array([0, *itertools.accumulate(map(len, texts))])
        traces = [trace_texts(source, cut_by(pattern), drawn, offsets) for pattern in PATTERNS.values()]
        for one, other in itertools.permutations(traces, 2):
            spans = span_residuals(one, other)
            # Bytes from a text's end: the EOS is 1, " a" is 2; the boundary before them lies at the same place in all.
            reached = [residual_before(one, spans, row, 3) for row in range(len(texts))]
            assert np.allclose(reached, reached[0], rtol=0, atol=1e-9)
            differing += abs(reached[0]) > 1e-6
    assert differing


def residual_before(peer, spans, row: int, num_bytes: int) -> float:
    """Return R, the cumulative residual, of one text at the boundary with `num_bytes` left."""
    tokens = slice(*peer.offsets[row : row + 2])
    left = num_bytes
    taken = len(peer.widths[tokens])
    while left > 0:
        taken -= 1
        left -= peer.widths[tokens][taken]
    assert left == 0
    start, end = spans.offsets[row : row + 2]
    ends = np.cumsum(spans.peer_tokens[start:end])
    return float(spans.cumulative[start:end][ends == taken][0])


def check_what_joins_words_is_not_measured(receivers, random: Random) -> None:
    """A tokenizer that cuts a text otherwise than its words, or cannot write them, gets a reason, not a figure."""
    source = make_source(random)
    drawn, offsets = source.sample(40, np.random.default_rng(random.getrandbits(32)))
    texts = source.texts(drawn, offsets)
    assert texts == [" ".join(WORDS[word] for word in drawn[a:b]) for a, b in itertools.pairwise(offsets)]
    for joining, differs in ((r"n h|[a-z]| |\d", any("n h" in text for text in texts)), (r".. ?|.", True)):
        with never_raises(joining):
            found = trace_texts(source, cut_by(joining), drawn, offsets)
        assert isinstance(found, NotMeasurable) == differs, joining

    def cut_no_digits(texts):
        return [[] if "1" in text else row for text, row in zip(texts, cut_by(r".")(texts), strict=True)]

    with never_raises("words that cannot be written"):
        assert isinstance(trace_texts(source, cut_no_digits, drawn, offsets), NotMeasurable)
    empty, written = cut_words(receivers["metaspace"], ["a\u2581b", "yah"])
    assert empty == []
    assert sum(width for _, width in written) == len(b"yah")


def check_floors_of_real_kinds_are_exact_or_absent(receivers, random: Random) -> None:
    """For every ordered pair of kinds the floor over whole texts is 0 to 1e-9, or there is none and it says why."""
    source = make_source(random)
    drawn, offsets = source.sample(25, np.random.default_rng(random.getrandbits(32)))
    traces = {kind: trace_texts(source, partial(cut_words, receivers[kind]), drawn, offsets) for kind in KINDS}
    assert sum(not isinstance(trace, NotMeasurable) for trace in traces.values()) >= 3
    for one, other in itertools.product(traces.values(), repeat=2):
        if not isinstance(one, NotMeasurable) and not isinstance(other, NotMeasurable):
            assert measure_floor(one, other).max_sequence_nats < 1e-9
