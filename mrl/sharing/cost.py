"""What sharing costs a receiver, per peer: the residual of the peer's answers in own tokens, as metrics.

The source sends how its tokenizer cut the answer, and the log-probs. The receiver aligns that with its own tokens, and
once the answer was trained on, with its own log-probs. Nothing here changes what is trained on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.residual import KINDS, summarise
from mrl.alignment.selection import select_rows

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
    """A peer's answer that was looked at, or an own one that a peer has scored."""

    source: str
    reason: str
    """Why it could not be used, "" that it could."""
    trace_fault: str = ""
    """Why its trace was not believed, "" that it was."""
    prompt_id: str = ""
    record_id: str = ""
    answer: int = 0
    """Its place in the record."""


class SharedRows(NamedTuple):
    """A peer's answers of one step in own tokens, or own ones with the log-probs that it gave them."""

    source: str
    places: tuple[int, ...]
    """Of every row, its place among the step's examples; -1 for one that is not trained on."""
    batch: AlignedBatch
    answers: tuple[Tried, ...] = ()
    """Which answer every row is."""


def tried_values(tried: Sequence[Tried]) -> dict[str, float]:
    """Per peer: answers looked at in this step, and how many could not be used or had no sound trace, by reason."""
    values: dict[str, float] = {}
    for source in sorted({item.source for item in tried}):
        mine = [item for item in tried if item.source == source]
        rejected = Counter(item.reason for item in mine if item.reason)
        faults = Counter(item.trace_fault for item in mine if item.trace_fault)
        values[f"align/rows/{source}"] = float(len(mine))
        values[f"align/rejected_share/{source}"] = rejected.total() / len(mine)
        values |= {f"align/rejected/{reason}/{source}": float(rows) for reason, rows in rejected.items()}
        values |= {f"align/trace_rejected/{reason}/{source}": float(rows) for reason, rows in faults.items()}
    return values


def shared_values(shared: Sequence[SharedRows]) -> dict[str, float]:
    """Per peer: coverage and lengths."""
    values: dict[str, float] = {}
    for rows in shared:
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


def gap_values(shared: Sequence[SharedRows], logprobs: Mapping[int, npt.NDArray[np.float32]]) -> dict[str, float]:
    """Per peer: own log-probs of its answers against its own, once they were trained on.

    `logprobs` holds those of examples by place. An answer is left out that has none, or was trained on in other tokens
    than it was aligned in.
    """
    values: dict[str, float] = {}
    for rows in shared:
        usable = usable_rows(rows, logprobs)
        if not usable:
            continue
        own = np.concatenate([logprobs[rows.places[row]] for row in usable])
        residual = summarise(select_rows(rows.batch, usable), own)
        found = {name: getattr(residual, name) for name in GAPS}
        values |= {f"align/{name}/{rows.source}": value for name, value in found.items() if value is not None}
    return values


def usable_rows(rows: SharedRows, logprobs: Mapping[int, npt.NDArray[np.float32]]) -> list[int]:
    """Rows that were trained on in the very tokens that they were aligned in, so that own log-probs can be laid on."""
    sizes = np.diff(rows.batch.row_offsets).tolist()
    own = [logprobs.get(place, np.zeros(0, np.float32)) for place in rows.places]
    return [row for row, part in enumerate(own) if part.size == sizes[row] and part.size]
