"""What to expect of a pair of tokenizers before any training: the pair card.

Per direction and kind of text: how much of it falls into 1:1 spans, how lengths change, what is rejected. Per direction
the floor: what the two tokenizers alone make of the log-ratio of one policy with itself (`exact_tries`), below which no
residual of a run can fall; it depends on the words and numbers that `card_text` draws, so read it as an order of
magnitude. And the commonest spans that the two cut differently.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mrl.alignment.card_text import word_frequencies
from mrl.alignment.exact_tries import ExactModel, Floor, Word, WordSource, measure_floor
from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.residual import KINDS, summarise
from mrl.alignment.translate import AlignedBatch, translate_batch

MAX_TOKENS = 1 << 20
FLOOR_TEXTS = 3_000
EXAMPLES_PER_KIND = 3


@dataclass(frozen=True, slots=True)
class Coverage:
    """One direction on one kind of text. `share` is of receiver tokens, by kind of span."""

    rows: int
    bytes: int
    share: Mapping[str, float]
    one_to_one_byte_share: float
    length_ratio: float
    tokens_per_span: float
    bytes_per_span: float
    p99_tokens_per_span: int
    max_tokens_per_span: int
    rejected: Mapping[str, int]
    flagged: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Direction:
    """What the receiver gets of the peer."""

    peer: str
    receiver: str
    coverage: Mapping[str, Coverage]
    """Kind of text -> coverage."""
    floor: Floor


@dataclass(frozen=True, slots=True)
class SpanText:
    """One common span as both sides cut it."""

    peer: tuple[bytes, ...]
    receiver: tuple[bytes, ...]

    @property
    def is_one_to_one(self) -> bool:
        """Whether both sides hold it as one token."""
        return len(self.peer) == len(self.receiver) == 1


@dataclass(frozen=True, slots=True)
class Example:
    """A span that the two cut differently, and how often it came in one kind of text."""

    span: SpanText
    count: int
    kind: str


@dataclass(frozen=True, slots=True)
class PairCard:
    """A pair of tokenizers, both directions."""

    names: tuple[str, str]
    fingerprints: tuple[str, str]
    directions: tuple[Direction, Direction]
    examples: tuple[Example, ...]
    """Peer side: the first tokenizer."""

    @property
    def is_identity(self) -> bool:
        """Whether both are one tokenizer: then ids pass through and nothing is lost."""
        return self.fingerprints[0] == self.fingerprints[1]

    def to_json(self) -> dict[str, Any]:
        """The card as JSON values; bytes as text, with replacement characters where they are none."""
        content: dict[str, Any] = asdict(self)
        content["examples"] = [
            {
                "peer": [piece.decode("utf-8", "replace") for piece in example.span.peer],
                "receiver": [piece.decode("utf-8", "replace") for piece in example.span.receiver],
                "count": example.count,
                "kind": example.kind,
            }
            for example in self.examples
        ]
        return content


def make_card(
    names: tuple[str, str], receivers: tuple[Receiver, Receiver], texts: Mapping[str, Sequence[str]], *, seed: int = 0
) -> PairCard:
    """The card of a pair on `texts`, kind -> rows."""
    first, second = receivers
    forth = {kind: translated(first, second, rows) for kind, rows in texts.items()}
    back = {kind: translated(second, first, rows)[1] for kind, rows in texts.items()}
    floors = pair_floors(first, second, np.random.default_rng(seed))
    directions = (
        Direction(*names, {kind: coverage_of(batch) for kind, (_, batch) in forth.items()}, floors[0]),
        Direction(*names[::-1], {kind: coverage_of(batch) for kind, batch in back.items()}, floors[1]),
    )
    return PairCard(names, (first.fingerprint, second.fingerprint), directions, _examples(forth))


def written_by(peer: Receiver, texts: Sequence[str]) -> list[PeerAnswer]:
    """The texts as answers of a policy with this tokenizer, log-probs all 0; its normalizer has its way."""
    cut = peer.cut_texts(texts, [text.encode() for text in texts])
    answers = []
    for start, end in pairwise(cut.offsets.tolist()):
        ids, lengths = cut.token_ids[start:end], cut.lengths[start:end]
        nothing = np.zeros(end - start, dtype=np.float32)
        special = peer.table.is_special(ids)
        answers.append(
            PeerAnswer(peer.completion_bytes(ids), lengths, nothing, special, False, peer.fingerprint, token_ids=ids)
        )
    return answers


def translated(peer: Receiver, receiver: Receiver, texts: Sequence[str]) -> tuple[list[PeerAnswer], AlignedBatch]:
    """The texts as the peer would write them, and what the receiver makes of them."""
    answers = written_by(peer, texts)
    return answers, translate_batch(answers, receiver, max_tokens=MAX_TOKENS)


def coverage_of(batch: AlignedBatch) -> Coverage:
    """The figures of one batch."""
    residual = summarise(batch)
    widths = batch.span_receiver_tokens
    return Coverage(
        rows=residual.rows,
        bytes=residual.bytes,
        share={kind: residual.share_of(kind) for kind in KINDS},
        one_to_one_byte_share=residual.one_to_one_byte_share,
        length_ratio=residual.length_ratio,
        tokens_per_span=residual.receiver_tokens / max(1, residual.spans),
        bytes_per_span=residual.bytes / max(1, residual.spans),
        p99_tokens_per_span=int(np.quantile(widths, 0.99)) if widths.size else 0,
        max_tokens_per_span=int(widths.max(initial=0)),
        rejected=residual.rejected,
        # Every row of a card ends where the text ends, which says nothing about the pair.
        flagged={name: rows for name, rows in residual.flagged.items() if name != Flag.TAIL.name},
    )


def pair_floors(first: Receiver, second: Receiver, rng: np.random.Generator) -> tuple[Floor, Floor]:
    """The residual of one policy with itself, first -> second and second -> first."""
    words, frequencies = word_frequencies()
    source = WordSource(words, np.array(frequencies) / sum(frequencies))
    drawn, offsets = source.sample(FLOOR_TEXTS, rng)
    here, there = (
        ExactModel(source, partial(cut_words, receiver)).trace(drawn, offsets) for receiver in (first, second)
    )
    return measure_floor(here, there), measure_floor(there, here)


def span_texts(answer: PeerAnswer, batch: AlignedBatch, row: int) -> list[SpanText]:
    """The common spans of one row as bytes on both sides; tokens without bytes are left out.

    Empty for a row that was rejected, or whose text the receiver reads in another normal form.
    """
    if batch.flags[row] & (Flag.REJECT | Flag.NORM):
        return []
    mine = slice(*batch.row_offsets[row : row + 2])
    theirs = slice(*batch.peer_offsets[row : row + 2])
    sides: list[dict[int, list[bytes]]] = []
    for spans, widths in (
        (batch.peer_span_of_token[theirs], batch.peer_token_bytes[theirs]),
        (batch.span_of_token[mine], batch.token_bytes[mine]),
    ):
        found: dict[int, list[bytes]] = {}
        end = 0
        for span, width in zip(spans.tolist(), widths.tolist(), strict=True):
            start, end = end, end + width
            if width and span >= 0:
                found.setdefault(span, []).append(answer.completion[start:end])
        sides.append(found)
    return [SpanText(tuple(sides[0][span]), tuple(sides[1][span])) for span in sorted(sides[0])]


def cut_words(receiver: Receiver, texts: Sequence[str]) -> list[Word]:
    """The texts as (id, bytes) per token. Raises ValueError for a text that this tokenizer cannot write exactly."""
    cut = receiver.cut_texts(texts, [text.encode() for text in texts])
    if cut.faults:
        raise ValueError(f"{len(cut.faults)} words cannot be written exactly")
    flat = list(zip(cut.token_ids.tolist(), cut.lengths.tolist(), strict=True))
    return [flat[start:end] for start, end in pairwise(cut.offsets.tolist())]


def _examples(forth: Mapping[str, tuple[list[PeerAnswer], AlignedBatch]]) -> tuple[Example, ...]:
    """The commonest of every kind of text; a span stands only where it comes most often."""
    counts: dict[str, Counter[SpanText]] = {kind: Counter() for kind in forth}
    for kind, (answers, batch) in forth.items():
        for row, answer in enumerate(answers):
            counts[kind].update(span for span in span_texts(answer, batch, row) if not span.is_one_to_one)
    examples: list[Example] = []
    for kind, mine in counts.items():
        others = [other for name, other in counts.items() if name != kind]
        typical = [(span, n) for span, n in mine.most_common(100) if all(n >= other[span] for other in others)]
        examples += [Example(span, n, kind) for span, n in typical[:EXAMPLES_PER_KIND]]
    return tuple(examples)
