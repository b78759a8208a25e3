"""The pair card: expectations of a pair of tokenizers before any training.

Per direction and kind of text the card gives the share of text in 1:1 spans, the change of lengths, and the rejected
rows. Per direction it gives the floor: the log-ratio of one policy with itself that the two tokenizers alone make
(`exact_tries`). No residual of a run can fall below the floor. It depends on the words and numbers that `card_text`
draws, so read it as an order of magnitude. A tokenizer that joins words has no such figure, and the card says so. The
card also lists the commonest spans that the two cut differently. A tokenizer that cannot be read exactly makes a card
without directions, with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mrl.alignment.card_text import word_frequencies
from mrl.alignment.exact_tries import Floor, NotMeasurable, Word, WordDistribution, measure_floor, trace_texts
from mrl.alignment.flags import Flag
from mrl.alignment.peer_answer import Int32s, PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.residual import KINDS, summarise
from mrl.alignment.translate import AlignedBatch, translate_batch
from mrl.errors import TokenizerRefused
from mrl.records.finish import FinishReason

MAX_TOKENS = 1 << 20
FLOOR_TEXTS = 3_000
EXAMPLES_PER_KIND = 3


@dataclass(frozen=True, slots=True)
class Coverage:
    """Figures of one direction on one kind of text. `share` is the share of receiver tokens, by kind of span."""

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
    """Translation from the peer to the receiver."""

    peer: str
    receiver: str
    coverage: Mapping[str, Coverage]
    """Kind of text -> coverage."""
    floor: Floor | NotMeasurable


@dataclass(frozen=True, slots=True)
class SpanText:
    """One common span as both tokenizers cut it."""

    peer: tuple[bytes, ...]
    receiver: tuple[bytes, ...]

    @property
    def is_one_to_one(self) -> bool:
        """Whether the span is one token on both sides."""
        return len(self.peer) == len(self.receiver) == 1

    @property
    def is_rewritten(self) -> bool:
        """Whether the receiver reads other bytes than the peer wrote, because it puts text into NFC."""
        return b"".join(self.peer) != b"".join(self.receiver)


@dataclass(frozen=True, slots=True)
class CutExample:
    """A span that the two tokenizers cut differently, and how often it came in one kind of text."""

    span: SpanText
    count: int
    kind: str


@dataclass(frozen=True, slots=True)
class PairCard:
    """Card of a pair of tokenizers, in both directions."""

    names: tuple[str, str]
    fingerprints: tuple[str, str]
    """Fingerprints of both; empty for a refused tokenizer."""
    directions: tuple[Direction, ...]
    """First -> second and second -> first; none where one of the two tokenizers is refused."""
    examples: tuple[CutExample, ...]
    """Commonest spans that the two cut differently; the first tokenizer is the peer's."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Name -> why this tokenizer cannot be aligned exactly."""

    @property
    def is_identity(self) -> bool:
        """Whether both are the same tokenizer: then ids pass through and nothing is lost."""
        return not self.refusals and self.fingerprints[0] == self.fingerprints[1]

    def to_json(self) -> dict[str, Any]:
        """Return the card as JSON values; bytes as text, with replacement characters where they are no UTF-8.

        A floor that cannot be measured is {"not_measurable": why}.
        """
        content: dict[str, Any] = asdict(self)
        for direction, written in zip(self.directions, content["directions"], strict=True):
            if isinstance(direction.floor, NotMeasurable):
                written["floor"] = {"not_measurable": direction.floor.reason}
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
    names: tuple[str, str],
    receivers: tuple[Receiver | TokenizerRefused, Receiver | TokenizerRefused],
    texts: Mapping[str, Sequence[str]],
) -> PairCard:
    """Make the card of a pair on `texts`, kind -> rows; with only refusals and fingerprints where a tokenizer was
    refused.
    """
    first, second = receivers
    if isinstance(first, TokenizerRefused) or isinstance(second, TokenizerRefused):
        sides = dict(zip(names, receivers, strict=True))
        refusals = {name: str(side) for name, side in sides.items() if isinstance(side, TokenizerRefused)}
        known = ["" if isinstance(side, TokenizerRefused) else side.fingerprint for side in receivers]
        return PairCard(names, (known[0], known[1]), (), (), refusals)
    forth = {kind: translated(first, second, rows) for kind, rows in texts.items()}
    back = {kind: translated(second, first, rows)[1] for kind, rows in texts.items()}
    floors = pair_floors(names, (first, second), np.random.default_rng(0))
    directions = (
        Direction(*names, {kind: coverage_of(batch) for kind, (_, batch) in forth.items()}, floors[0]),
        Direction(*names[::-1], {kind: coverage_of(batch) for kind, batch in back.items()}, floors[1]),
    )
    return PairCard(names, (first.fingerprint, second.fingerprint), directions, _examples(forth, second))


def written_by(peer: Receiver, texts: Sequence[str]) -> list[PeerAnswer]:
    """Return the texts as answers of a policy with this tokenizer, log-probs all 0; its normalizer may change the
    texts.
    """
    cut = peer.cut_texts(texts, [text.encode() for text in texts])
    answers = []
    for start, end in pairwise(cut.offsets.tolist()):
        ids, lengths = cut.token_ids[start:end], cut.lengths[start:end]
        nothing = np.zeros(end - start, dtype=np.float32)
        special = peer.table.is_special(ids)
        answers.append(
            PeerAnswer(
                peer.completion_bytes(ids), lengths, nothing, special, FinishReason.LENGTH, peer.fingerprint, ids
            )
        )
    return answers


def translated(peer: Receiver, receiver: Receiver, texts: Sequence[str]) -> tuple[list[PeerAnswer], AlignedBatch]:
    """Return the texts as the peer would write them, and their translation for the receiver."""
    answers = written_by(peer, texts)
    return answers, translate_batch(answers, receiver, max_tokens=MAX_TOKENS)


def coverage_of(batch: AlignedBatch) -> Coverage:
    """Return the figures of one batch."""
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


def pair_floors(
    names: tuple[str, str], receivers: tuple[Receiver, Receiver], rng: np.random.Generator
) -> tuple[Floor | NotMeasurable, Floor | NotMeasurable]:
    """Return the residuals of one policy with itself, first -> second and second -> first."""
    words, frequencies = word_frequencies()
    source = WordDistribution(words, np.array(frequencies) / sum(frequencies))
    drawn, offsets = source.sample(FLOOR_TEXTS, rng)
    traces = [trace_texts(source, partial(cut_words, receiver), drawn, offsets) for receiver in receivers]
    for name, trace in zip(names, traces, strict=True):
        if isinstance(trace, NotMeasurable):
            why = NotMeasurable(f"{name}: {trace.reason}")
            return why, why
    here, there = (trace for trace in traces if not isinstance(trace, NotMeasurable))
    return measure_floor(here, there), measure_floor(there, here)


def span_texts(answer: PeerAnswer, batch: AlignedBatch, row: int, receiver: Receiver) -> list[SpanText]:
    """Return the common spans of one row as the peer wrote them and as the receiver reads them; a rejected row has
    none.

    Tokens without bytes are left out.
    """
    if batch.flags[row] & Flag.REJECT:
        return []
    mine = slice(*batch.row_offsets[row : row + 2])
    theirs = slice(*batch.peer_offsets[row : row + 2])
    own = receiver.completion_bytes(batch.token_ids[mine])
    written = _pieces(answer.completion, batch.peer_span_of_token[theirs], batch.peer_token_bytes[theirs])
    read = _pieces(own, batch.span_of_token[mine], batch.token_bytes[mine])
    return [SpanText(tuple(written[span]), tuple(read[span])) for span in sorted(written)]


def _pieces(data: bytes, spans: Int32s, widths: Int32s) -> dict[int, list[bytes]]:
    """Return span -> the bytes of its tokens, from the bytes of the row and the span and width of every token."""
    found: dict[int, list[bytes]] = {}
    end = 0
    for span, width in zip(spans.tolist(), widths.tolist(), strict=True):
        start, end = end, end + width
        if width and span >= 0:
            found.setdefault(span, []).append(data[start:end])
    return found


def cut_words(receiver: Receiver, texts: Sequence[str]) -> list[Word]:
    """Return the texts as (id, bytes) per token; no tokens for a text that this tokenizer cannot write exactly."""
    cut = receiver.cut_texts(texts, [text.encode() for text in texts])
    flat = list(zip(cut.token_ids.tolist(), cut.lengths.tolist(), strict=True))
    rows = enumerate(pairwise(cut.offsets.tolist()))
    return [[] if row in cut.faults else flat[start:end] for row, (start, end) in rows]


def _examples(forth: Mapping[str, tuple[list[PeerAnswer], AlignedBatch]], receiver: Receiver) -> tuple[CutExample, ...]:
    """Return the commonest spans of every kind of text; a span is listed only under the kind where it comes most often,
    the first kind in a tie.
    """
    counts = {kind: Counter(_cut_differently(*written, receiver)) for kind, written in forth.items()}
    most: dict[SpanText, tuple[int, str]] = {}
    for kind, mine in counts.items():
        for span, count in mine.items():
            if count > most.get(span, (0, ""))[0]:
                most[span] = count, kind
    examples: list[CutExample] = []
    for kind, mine in counts.items():
        typical = [(span, count) for span, count in mine.most_common() if most[span] == (count, kind)]
        examples += [CutExample(span, count, kind) for span, count in typical[:EXAMPLES_PER_KIND]]
    return tuple(examples)


def _cut_differently(answers: Sequence[PeerAnswer], batch: AlignedBatch, receiver: Receiver) -> Iterator[SpanText]:
    for row, answer in enumerate(answers):
        for span in span_texts(answer, batch, row, receiver):
            if not (span.is_one_to_one or span.is_rewritten):
                yield span
