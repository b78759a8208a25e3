"""Batches whose update was left out, kept for whoever wants to know why: JSON lines, one a row."""

from pathlib import Path

import msgspec
import numpy.typing as npt

from mrl.files import replace_file
from mrl.learner.order import StepOrder

KEPT = 3
"""Newest batches of a policy that are kept."""


def keep_batch(folder: Path, policy: str, step: int, order: StepOrder) -> Path:
    """Write the rows that step `step` trained on; returns the file. Values that are no numbers appear as null.

    Raises OSError.
    """
    path = folder / f"skipped-{policy}-step_{step}.jsonl"
    lines = [
        msgspec.json.encode(
            {
                "prompt_id": row.prompt_id,
                "source": row.source,
                "component": row.component,
                "denominator": order.denominators[row.component],
                "prompt_token_ids": row.prompt_token_ids.tolist(),
                "answer_token_ids": row.answer_token_ids.tolist(),
                "advantages": row.advantages.tolist(),
                "weights": row.weights.tolist(),
                "behaviour_logprobs": _listed(row.behaviour_logprobs),
                "teacher_logprobs": _listed(row.teacher_logprobs),
            }
        )
        for row in order.examples
    ]
    replace_file(path, b"\n".join(lines) + b"\n")
    kept = sorted(folder.glob(f"skipped-{policy}-step_*.jsonl"), key=_step_of)
    for old in kept[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def _listed(values_T: npt.NDArray | None) -> list[float] | None:
    return None if values_T is None else values_T.tolist()


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])
