"""What sharing costs, answer by answer: one line for every peer answer that a learner looked at in a step.

Shapes: R answers of one peer in one step, T own tokens of one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Flag
from mrl.alignment.residual import RowResiduals, row_residuals
from mrl.alignment.selection import select_rows
from mrl.records.telemetry_messages import RowResidual
from mrl.sharing.cost import SharedRows, Tried, usable_rows

Logprobs = Mapping[int, npt.NDArray[np.float32]]
"""Place among the step's examples -> [T] own log-probs."""


def row_residuals_of(tried: Sequence[Tried], shared: Sequence[SharedRows], logprobs: Logprobs) -> list[RowResidual]:
    """Lines of all answers that were looked at: those trained on, by source, with their figures, then the others.

    The figures that compare own log-probs with the peer's need `logprobs`, and a trace.
    """
    lines = [line for rows in shared for line in _trained(rows, logprobs)]
    trained = {_key(one) for rows in shared for one in rows.answers}
    return lines + [RowResidual(**_named(one), trained=False) for one in tried if _key(one) not in trained]


def _trained(rows: SharedRows, logprobs: Logprobs) -> Iterator[RowResidual]:
    coverage = row_residuals(rows.batch)
    gaps = _gaps(rows, logprobs)
    for row, one in enumerate(rows.answers):
        yield RowResidual(**_named(one), trained=True, **_coverage(coverage, row), **gaps.get(row, {}))


def _key(one: Tried) -> tuple[str, str, int]:
    return one.source, one.record_id, one.answer


def _named(one: Tried) -> dict[str, Any]:
    return {
        "source": one.source,
        "prompt_id": one.prompt_id,
        "record_id": one.record_id,
        "answer": one.answer,
        "rejected": one.reason,
        "trace_fault": one.trace_fault,
    }


def _coverage(rows: RowResiduals, row: int) -> dict[str, Any]:
    """Without a trace nothing is known of the peer's tokens, so neither of shares and ratios."""
    own, flags = int(rows.receiver_tokens[row]), int(rows.flags[row])
    found: dict[str, Any] = {
        "flags": [flag.name for flag in Flag if flags & flag],
        "own_tokens": own,
        "bytes": int(rows.bytes[row]),
    }
    peer = int(rows.peer_tokens[row] - rows.dropped_tokens[row])
    if flags & Flag.UNTRACED or not own or not peer:
        return found
    return found | {
        "peer_tokens": peer,
        "spans": int(rows.spans[row]),
        "spans_of_kind": rows.spans_of_kind[row].tolist(),
        "max_tokens_per_span": int(rows.max_tokens_per_span[row]),
        "one_to_one_tokens": float(rows.one_to_one_tokens[row] / own),
        "one_to_one_bytes": float(rows.one_to_one_bytes[row] / max(1, rows.bytes[row])),
        "length_ratio": own / peer,
        "peer_nats": float(rows.peer_nats[row]),
        "dropped_nats": float(rows.dropped_nats[row]),
    }


def _gaps(rows: SharedRows, logprobs: Logprobs) -> dict[int, dict[str, Any]]:
    """Row -> its figures against own log-probs; rows without any, or without a trace, are left out."""
    usable = [row for row in usable_rows(rows, logprobs) if not rows.batch.flags[row] & Flag.UNTRACED]
    if not usable:
        return {}
    batch = select_rows(rows.batch, usable)
    found = row_residuals(batch, np.concatenate([logprobs[rows.places[row]] for row in usable]))
    assert found.gap_nats is not None
    assert found.span_std_nats is not None
    assert found.span_p95_nats is not None
    assert found.outside_band is not None
    weights = _shares(found.gap_nats)
    return {
        row: {
            "gap_nats": _known(found.gap_nats[n]),
            "gap_nats_per_byte": _known(found.gap_nats[n] / max(1, found.bytes[n])),
            "gap_nats_per_token": _known(found.gap_nats[n] / max(1, found.receiver_tokens[n])),
            "span_std_nats": _known(found.span_std_nats[n]),
            "span_p95_nats": _known(found.span_p95_nats[n]),
            "outside_band": _known(found.outside_band[n]),
            "ess_weight": _known(weights[n]),
        }
        for n, row in enumerate(usable)
    }


def _shares(gaps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[R] exp of the gaps, divided by their sum; safe for gaps that under- or overflow."""
    weights = np.exp(gaps - np.nanmax(gaps))
    shares: npt.NDArray[np.float64] = weights / np.nansum(weights)
    return shares


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
