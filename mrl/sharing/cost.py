"""What sharing costs a receiver, per peer: the residual of the peer's answers in own tokens, as metrics.

The source sends how its tokenizer cut the answer, and the log-probs (`TokenTrace`). The receiver aligns that with its
own tokens, and once the answer was trained on, with its own log-probs. Nothing here changes what is trained on.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver
from mrl.alignment.residual import summarise
from mrl.alignment.source import describe_answers
from mrl.alignment.translate import AlignedBatch, translate_batch
from mrl.records.codec import unpack_array
from mrl.records.experience import OutcomeRecord, TokenTrace
from mrl.records.rollouts import Answer

GAPS = (
    "gap_nats_per_byte",
    "gap_nats_per_token",
    "span_std_nats",
    "span_p95_nats",
    "outside_band",
    "sequence_ess",
    "span_ess",
)


class Tried(NamedTuple):
    """A peer's answer that a rescue was tried with; `reason` says why it could not be used, "" that it was."""

    record: OutcomeRecord
    reason: str


class SharedRows(NamedTuple):
    """A peer's answers of one step in own tokens."""

    source: str
    places: tuple[int, ...]
    """Of every row, its place among the step's examples."""
    batch: AlignedBatch


def trace_of(answer: Answer, receiver: Receiver) -> TokenTrace | None:
    """How the own tokenizer cut an own answer; None when its ids do not stand for its completion."""
    token_ids, logprobs = unpack_array(answer.token_ids, "i4"), unpack_array(answer.logprobs, "f4")
    (described,) = describe_answers(receiver, [token_ids], [logprobs], [answer.finished])
    fields = described.fields()
    if described.completion != answer.completion or isinstance(validate(**fields), Rejected):
        return None
    names = ("byte_lengths", "logprobs", "special", "noncanonical")
    return TokenTrace(**{name: fields[name] for name in names})


def peer_answer(record: OutcomeRecord) -> PeerAnswer | Rejected | None:
    """The record's answer as alignment takes it; None without a trace, Rejected when the trace is none."""
    trace = record.trace
    if trace is None:
        return None
    return validate(
        completion=record.completion,
        byte_lengths=trace.byte_lengths,
        logprobs=trace.logprobs,
        special=trace.special,
        finished=record.finished,
        fingerprint=record.fingerprint,
        noncanonical=trace.noncanonical,
    )


def align_shared(used: Sequence[tuple[int, OutcomeRecord]], receiver: Receiver, *, max_tokens: int) -> list[SharedRows]:
    """Used answers, each with its place among the examples, aligned with their peers' tokens, per peer.

    Answers without a trace, or with one that does not fit them, are left out.
    """
    found: defaultdict[str, list[tuple[int, PeerAnswer]]] = defaultdict(list)
    for place, record in used:
        answer = peer_answer(record)
        if isinstance(answer, PeerAnswer):
            found[record.source].append((place, answer))
    return [
        SharedRows(
            source,
            tuple(place for place, _ in rows),
            translate_batch([answer for _, answer in rows], receiver, max_tokens=max_tokens),
        )
        for source, rows in sorted(found.items())
    ]


def tried_values(tried: Sequence[Tried]) -> dict[str, float]:
    """Per peer: how many answers were tried in this step, and how many of them could not be used, by reason."""
    values: dict[str, float] = {}
    for source in sorted({item.record.source for item in tried}):
        reasons = [item.reason for item in tried if item.record.source == source]
        rejected = Counter(reason for reason in reasons if reason)
        values[f"align/rows/{source}"] = float(len(reasons))
        values[f"align/rejected_share/{source}"] = rejected.total() / len(reasons)
        values |= {f"align/rejected/{reason}/{source}": float(rows) for reason, rows in rejected.items()}
    return values


def shared_values(shared: Sequence[SharedRows]) -> dict[str, float]:
    """Per peer: coverage and lengths."""
    values: dict[str, float] = {}
    for rows in shared:
        residual = summarise(rows.batch)
        found = {
            "one_to_one_tokens": residual.share_of("one_to_one"),
            "one_to_one_bytes": residual.one_to_one_byte_share,
            "length_ratio": residual.length_ratio,
            "receiver_tokens": float(residual.receiver_tokens),
            "bytes": float(residual.bytes),
            "spans": float(residual.spans),
            "peer_nats_per_byte": residual.peer_nats / max(1, residual.bytes),
            "dropped_nats": residual.dropped_nats,
        }
        found |= {f"flagged/{name.lower()}": float(count) for name, count in residual.flagged.items()}
        values |= {f"align/{name}/{rows.source}": value for name, value in found.items()}
    return values


def gap_values(shared: Sequence[SharedRows], logprobs: Mapping[int, npt.NDArray[np.float32]]) -> dict[str, float]:
    """Per peer: own log-probs of its answers against its own, once they were trained on.

    `logprobs` holds those of examples by place. A peer is left out when a row of it has none, or was trained on in
    other tokens than it was aligned in.
    """
    values: dict[str, float] = {}
    for rows in shared:
        own = [logprobs.get(place, np.zeros(0, np.float32)) for place in rows.places]
        sizes = np.diff(rows.batch.row_offsets)
        if [part.size for part in own] != sizes.tolist() or not sizes.sum():
            continue
        residual = summarise(rows.batch, np.concatenate(own))
        found = {name: getattr(residual, name) for name in GAPS}
        values |= {f"align/{name}/{rows.source}": value for name, value in found.items() if value is not None}
    return values
