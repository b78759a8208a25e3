"""The cost of sharing in one step, as metrics for each peer.

The recorder sees the answers that regimes read of peers, as `ExaminedAnswer`, and which training examples hold one of
these. Own log-probs come from the training pass. Nothing here changes what is trained on, and no regime takes part.

Shapes: R answers of one peer that a step trained on, T own tokens of one of them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch, merge
from mrl.alignment.residual import KINDS, summarise
from mrl.alignment.selection import first_tokens, select_rows
from mrl.sharing.regime import WITHHELD, ExaminedAnswer, Float32s, TrainingExample

GAPS = (
    "gap_nats_per_byte",
    "gap_nats_per_token",
    "span_std_nats",
    "span_p95_nats",
    "outside_band",
    "sequence_ess",
    "span_ess",
)


class TrainedAnswers(NamedTuple):
    """The R answers of one peer that a step trained on."""

    source: str
    batch: AlignedBatch
    """[R] the trained part of each answer: a row that the regime cut ends where the training example does."""
    logprobs: list[Float32s | None]
    """[R] own log-probs [T]; None where the training pass gave none, or trained other tokens than the aligned ones."""


class SharingRecorder:
    """Collects the answers that a regime examines until the step is recorded. One thread uses it."""

    def __init__(self) -> None:
        self._examined: list[ExaminedAnswer] = []

    def examine(self, answers: Iterable[ExaminedAnswer]) -> None:
        """Note answers that a regime reads."""
        self._examined += answers

    def record(self, examples: Sequence[TrainingExample], logprobs: Mapping[int, Float32s]) -> dict[str, float]:
        """Return metrics `align/.../{source}` of a step that trained on `examples`; the next record counts anew.

        `logprobs` maps places among `examples` to own log-probs [T].
        """
        examined, self._examined = self._examined, []
        trained = list(_by_source(examples, logprobs))
        return examined_values(examined) | coverage_values(trained) | gap_values(trained)


def examined_values(examined: Sequence[ExaminedAnswer]) -> dict[str, float]:
    """Return, per peer, how many answers were examined, and how many could not be used or had no sound trace, by
    reason.
    """
    values: dict[str, float] = {}
    for source in sorted({answer.source for answer in examined}):
        mine = [answer for answer in examined if answer.source == source]
        rejected = Counter(answer.rejected for answer in mine if answer.rejected)
        faults = Counter(answer.trace_fault for answer in mine if answer.trace_fault)
        values[f"align/rows/{source}"] = float(len(mine))
        values[f"align/rejected_share/{source}"] = (rejected.total() - rejected[WITHHELD]) / len(mine)
        values |= {f"align/rejected/{reason}/{source}": float(rows) for reason, rows in rejected.items()}
        values |= {f"align/trace_rejected/{reason}/{source}": float(rows) for reason, rows in faults.items()}
    return values


def coverage_values(trained: Sequence[TrainedAnswers]) -> dict[str, float]:
    """Return, per peer, how far spans of both tokenizers coincide, and lengths of the answers trained on."""
    values: dict[str, float] = {}
    for rows in trained:
        residual = summarise(rows.batch)
        found = {
            **{f"{kind}_tokens": residual.share_of(kind) for kind in KINDS},
            "one_to_one_bytes": residual.one_to_one_byte_share,
            "length_ratio": residual.length_ratio,
            "receiver_tokens": float(residual.receiver_tokens),
            "bytes": float(residual.bytes),
            "spans": float(residual.spans),
            "peer_nats_per_byte": residual.aligned_nats / max(1, residual.bytes),
            "dropped_nats": residual.dropped_nats,
        }
        found |= {f"flagged/{name.lower()}": float(count) for name, count in residual.flagged.items()}
        values |= {f"align/{name}/{rows.source}": value for name, value in found.items()}
    return values


def gap_values(trained: Sequence[TrainedAnswers]) -> dict[str, float]:
    """Return, per peer, own log-probs of its answers compared with the peer's. Answers without own log-probs are left
    out.
    """
    values: dict[str, float] = {}
    for rows in trained:
        known = {row: logprobs for row, logprobs in enumerate(rows.logprobs) if logprobs is not None}
        if known:
            residual = summarise(select_rows(rows.batch, list(known)), np.concatenate(list(known.values())))
            found = {name: getattr(residual, name) for name in GAPS}
            values |= {f"align/{name}/{rows.source}": value for name, value in found.items() if value is not None}
    return values


def _by_source(examples: Sequence[TrainingExample], logprobs: Mapping[int, Float32s]) -> Iterator[TrainedAnswers]:
    """Yield the answers trained on, sources by name. Of an answer behind several examples the first example counts."""
    place_of: dict[ExaminedAnswer, int] = {}
    for place, example in enumerate(examples):
        if example.examined is not None:
            place_of.setdefault(example.examined, place)
    found: defaultdict[str, list[ExaminedAnswer]] = defaultdict(list)
    for answer in place_of:
        found[answer.source].append(answer)
    for source, answers in sorted(found.items()):
        batches = list(dict.fromkeys(id(answer.batch) for answer in answers))
        answers.sort(key=lambda answer: (batches.index(id(answer.batch)), answer.row))
        places = [place_of[answer] for answer in answers]
        batch = _trained_part(_gathered(answers), [examples[place].trained_token_ids for place in places])
        parts = np.split(batch.token_ids, batch.row_offsets[1:-1])
        own = [
            logprobs.get(place) if part.size and np.array_equal(part, examples[place].trained_token_ids) else None
            for place, part in zip(places, parts, strict=True)
        ]
        yield TrainedAnswers(source, batch, own)


def _gathered(answers: Sequence[ExaminedAnswer]) -> AlignedBatch:
    """Return the rows of answers as one batch. Answers of one batch stand together, their rows ascending."""
    parts = []
    for _, group in itertools.groupby(answers, key=lambda answer: id(answer.batch)):
        rows = list(group)
        assert rows[0].batch is not None, "a rejected score is in no training example"
        parts.append(select_rows(rows[0].batch, [answer.row for answer in rows]))
    return merge(parts, len(parts))


def _trained_part(batch: AlignedBatch, trained: Sequence[npt.NDArray[np.int32]]) -> AlignedBatch:
    """Return the rows as far as they were trained.

    A row that was cut inside a span stays whole, since spans cannot be divided. So does a row of which other tokens
    than its first ones were trained, as in episodes without the ends of their turns.
    """
    ends = np.minimum(np.diff(batch.row_offsets), [tokens.size for tokens in trained])
    for row, (start, end) in enumerate(itertools.pairwise(batch.row_offsets.tolist())):
        cut = start + int(ends[row])
        is_cut = start < cut < end
        if is_cut and (
            batch.span_of_token[cut - 1] == batch.span_of_token[cut]
            or not np.array_equal(batch.token_ids[start:cut], trained[row])
        ):
            ends[row] = end - start
    return first_tokens(batch, ends.tolist())
