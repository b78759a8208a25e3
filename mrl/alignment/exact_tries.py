"""The tokenizer's own share of a log-ratio, measured exactly: one policy over bytes, seen through two tokenizers.

The policy writes words, drawn independently, and stops after each with a fixed probability. The probability of the next
token follows exactly from the mass below a node of the trie over the words' tokens:

    log p(token | word so far) = log M(node after the token) - log M(node before it)
    log p(word ends | word so far) = log p(word) - log M(node of the whole word)

Both sides are the same policy, so every log-ratio that is not 0 is made by the tokenizers alone. Over a whole finished
text it is 0; at a common boundary it is a number of that boundary only, so the residuals of spans telescope:

    R(b) = sum of d_s over the spans before b,    d_s = sum of receiver log-probs - sum of peer log-probs,    R(EOS) = 0

That holds for a tokenizer that cuts every word in a text as it cuts the word alone. Each text is therefore also cut as
a whole. Where that gives other tokens, as with tokenizers that join words, the result is `NotMeasurable`.

Shapes: N texts, W words of the source, T tokens over all texts, S common spans over all texts.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from mrl.alignment.ragged import sums_at
from mrl.alignment.shared_spans import align_batch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Word = list[tuple[int, int]]
"""Tokens of one word as (id, number of bytes), 0 bytes for a zero-width token."""
Cut = Callable[[Sequence[str]], list[Word]]
"""Texts -> their tokens under one tokenizer; a text that the tokenizer cannot write exactly has none."""

ANCHOR = "a"
EOS_ID = -1
NARROW, WIDE = (0.8, 1.2), (0.5, 2.0)
CHECKPOINTS = (5, 20, 50, 100)
FEW_TEXTS = 50


@dataclass(frozen=True, slots=True)
class WordDistribution:
    """Words with their probabilities, and the chance that a text ends after a word.

    Words are written with one space between them; no word holds a space.
    """

    words: tuple[str, ...]
    probabilities: Floats
    end_probability: float = 1 / 60

    def texts(self, words: Ints, offsets: Ints) -> list[str]:
        """Return the N texts that these words make."""
        return [" ".join(self.words[word] for word in words[a:b].tolist()) for a, b in pairwise(offsets.tolist())]

    def sample(self, num_texts: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw texts: (words of all texts one after the other, offsets of the texts [N + 1])."""
        lengths = rng.geometric(self.end_probability, num_texts)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return rng.choice(len(self.words), size=int(offsets[-1]), p=self.probabilities), offsets


@dataclass(frozen=True, slots=True)
class NotMeasurable:
    """Why a tokenizer's trace of the source is not known exactly."""

    reason: str


@dataclass(frozen=True, slots=True)
class Floor:
    """The log-ratio of one policy with itself, as two tokenizers alone make it.

    Shares are of spans. `cumulative_std` maps a number of spans of a text to the standard deviation of R after them.
    """

    texts: int
    spans: int
    max_sequence_nats: float
    span_std_nats: float
    one_to_one_std_nats: float
    other_std_nats: float
    outside_narrow: float
    outside_wide: float
    cumulative_std: Mapping[int, float]
    independent_std: Mapping[int, float]
    """`cumulative_std` if the residuals of spans were independent."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedTexts:
    """Traces of N texts one after the other: id of every token, its width in bytes, and its exact log-prob.

    Every text closes with an EOS of one virtual byte, id `EOS_ID`.
    """

    token_ids: Ints
    widths: Int32s
    logprobs: Floats
    offsets: Ints
    """[N + 1] where each text's tokens start."""


def trace_texts(source: WordDistribution, cut: Cut, words: Ints, offsets: Ints) -> TracedTexts | NotMeasurable:
    """Return the texts as the tokenizer of `cut` sees them, once it has cut the whole texts into the same tokens."""
    few = min(FEW_TEXTS, len(offsets) - 1)
    num_apart = _num_apart(source, cut, words[: offsets[few]], offsets[: few + 1])
    if num_apart:  # most tokenizers without a floor show it at once, and cutting all words takes seconds
        return NotMeasurable(f"{num_apart} of the first {few} texts are not tokenized like their single words")
    alone = cut(source.words)
    later = [_after_anchor(row) for row in cut([f"{ANCHOR} {word}" for word in source.words])]
    for rows, fault in ((alone, "cannot be written exactly"), (later, "share a token with the word before them")):
        if not all(rows):
            return NotMeasurable(f"{sum(not row for row in rows)} of {len(rows)} words {fault}")
    traced = ExactModel(source, alone, later).trace(words, offsets)
    whole = cut(source.texts(words, offsets))
    num_apart = sum(
        row != list(zip(traced.token_ids[a : b - 1].tolist(), traced.widths[a : b - 1].tolist(), strict=True))
        for row, (a, b) in zip(whole, pairwise(traced.offsets.tolist()), strict=True)
    )
    if num_apart:
        return NotMeasurable(f"{num_apart} of {len(whole)} texts are not tokenized like their single words")
    return traced


def _num_apart(source: WordDistribution, cut: Cut, words: Ints, offsets: Ints) -> int:
    """Return how many texts are not cut as their words are; 0 also where a word cannot be cut alone."""
    used, place = np.unique(words, return_inverse=True)
    names = [source.words[word] for word in used.tolist()]
    alone, later = cut(names), [_after_anchor(row) for row in cut([f"{ANCHOR} {name}" for name in names])]
    if not all(alone) or not all(later):
        return 0
    bounds = zip(cut(source.texts(words, offsets)), pairwise(offsets.tolist()), strict=True)
    return sum(row != [*alone[place[a]], *chain(*(later[n] for n in place[a + 1 : b]))] for row, (a, b) in bounds)


class ExactModel:
    """The policy of a `WordDistribution` as one tokenizer sees it: its tokens of every word, at a text's start and
    later.
    """

    def __init__(self, source: WordDistribution, first: Sequence[Word], later: Sequence[Word]) -> None:
        self._first = _Table(first, source.probabilities)
        self._later = _Table(later, source.probabilities)
        self._log_go, self._log_stop = np.log1p(-source.end_probability), np.log(source.end_probability)

    def trace(self, words: Ints, offsets: Ints) -> TracedTexts:
        """Return the texts in this tokenizer's tokens, with the exact log-prob of every token given all before it."""
        opens = np.zeros(words.size, dtype=bool)
        opens[offsets[:-1]] = True
        closes = np.zeros(words.size, dtype=bool)
        closes[offsets[1:] - 1] = True
        # One block per word and one for the EOS after the last word of a text.
        tokens = np.where(opens, self._first.sizes[words], self._later.sizes[words]) + closes
        bounds = np.concatenate([[0], np.cumsum(tokens)])
        token_ids = np.full(int(bounds[-1]), EOS_ID, dtype=np.int64)
        widths = np.ones(int(bounds[-1]), dtype=np.int32)
        logprobs = np.zeros(int(bounds[-1]))
        self._first.fill(words[opens], bounds[:-1][opens], token_ids, widths, logprobs)
        self._later.fill(words[~opens], bounds[:-1][~opens], token_ids, widths, logprobs)
        ended = np.where(opens, self._first.log_end[words], self._later.log_end[words])
        logprobs[bounds[:-1][~opens]] += np.concatenate([[0.0], ended[:-1]])[~opens] + self._log_go
        logprobs[bounds[1:][closes] - 1] = ended[closes] + self._log_stop
        return TracedTexts(token_ids, widths, logprobs, bounds[offsets])


@dataclass(frozen=True, slots=True, eq=False)
class SpanResiduals:
    """Residuals per common span: d_s in nats, token counts on both sides, and R at the span's end."""

    nats: Floats
    peer_tokens: Ints
    receiver_tokens: Ints
    cumulative: Floats
    offsets: Ints
    """[N + 1] where each text's spans start."""


def span_residuals(peer: TracedTexts, receiver: TracedTexts) -> SpanResiduals:
    """Return what each of the finest common spans of two traces adds to the log-ratio.

    Raises ValueError when the traces do not cover the same texts.
    """
    spans = align_batch(peer.widths, peer.offsets, receiver.widths, receiver.offsets)
    sides = ((spans.of_peer, peer), (spans.of_receiver, receiver))
    given, got = (sums_at(span, side.logprobs, spans.num_spans) for span, side in sides)
    peer_tokens, receiver_tokens = (np.bincount(span, minlength=spans.num_spans) for span, _ in sides)
    nats, offsets = got - given, spans.row_starts
    total = np.concatenate([[0.0], np.cumsum(nats)])
    cumulative = total[1:] - np.repeat(total[offsets[:-1]], np.diff(offsets))
    return SpanResiduals(nats, peer_tokens, receiver_tokens, cumulative, offsets)


def measure_floor(peer: TracedTexts, receiver: TracedTexts) -> Floor:
    """Return the residual of two traces of the same texts under the same policy; raises as `span_residuals` does."""
    spans = span_residuals(peer, receiver)
    ratios = np.exp(spans.nats)
    one = (spans.peer_tokens == 1) & (spans.receiver_tokens == 1)
    std = float(spans.nats.std())
    # R after k spans, of texts that go on: at the end of a text it is 0 by construction.
    starts, sizes = spans.offsets[:-1], np.diff(spans.offsets)
    at = {k: spans.cumulative[starts[sizes > k] + k - 1] for k in CHECKPOINTS if (sizes > k).sum() > 1}
    return Floor(
        texts=starts.size,
        spans=spans.nats.size,
        max_sequence_nats=float(np.abs(spans.cumulative[spans.offsets[1:] - 1]).max()),
        span_std_nats=std,
        one_to_one_std_nats=_std(spans.nats[one]),
        other_std_nats=_std(spans.nats[~one]),
        outside_narrow=outside_share(ratios, NARROW),
        outside_wide=outside_share(ratios, WIDE),
        cumulative_std={k: float(values.std()) for k, values in at.items()},
        independent_std={k: std * k**0.5 for k in at},
    )


def outside_share(ratios: Floats, band: tuple[float, float]) -> float:
    """Return the share of ratios outside a band."""
    return float(((ratios < band[0]) | (ratios > band[1])).mean()) if ratios.size else 0.0


def _std(values: Floats) -> float:
    return float(values.std()) if values.size else 0.0


class _Table:
    """The tokens of every word, with log-probs inside the word, and the log-prob that the word ends after them."""

    def __init__(self, words: Sequence[Word], probabilities: Floats) -> None:
        mass: defaultdict[tuple[int, ...], float] = defaultdict(float)
        paths = [tuple(token_id for token_id, _ in word) for word in words]
        for path, probability in zip(paths, probabilities, strict=True):
            for depth in range(1, len(path) + 1):
                mass[path[:depth]] += float(probability)
        logs = np.log([mass[path[:depth]] for path in paths for depth in range(1, len(path) + 1)])
        self.sizes: Ints = np.array([len(path) for path in paths], dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        firsts, lasts = self._offsets[:-1], self._offsets[1:] - 1
        self.log_end: Floats = np.log(probabilities) - logs[lasts]
        self._logs: Floats = np.diff(logs, prepend=0.0)
        self._logs[firsts] = logs[firsts]
        self._ids: Ints = np.array([token_id for word in words for token_id, _ in word], dtype=np.int64)
        self._widths: Int32s = np.array([width for word in words for _, width in word], dtype=np.int32)

    def fill(self, words: Ints, places: Ints, token_ids: Ints, widths: Int32s, logprobs: Floats) -> None:
        """Write the tokens of `words` into the flat columns, each word from its place on."""
        sizes = self.sizes[words]
        inside = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        target = np.repeat(places, sizes) + inside
        taken = np.repeat(self._offsets[words], sizes) + inside
        token_ids[target] = self._ids[taken]
        widths[target] = self._widths[taken]
        logprobs[target] = self._logs[taken]


def _after_anchor(tokens: Word) -> Word:
    """Return the tokens after the anchor; empty when a token covers its end."""
    position = 0
    for index, (_, width) in enumerate(tokens):
        if position == len(ANCHOR) and width:
            return tokens[index:]
        position += width
    return []
