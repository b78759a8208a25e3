"""Rows that people look at: samples of every step, and batches whose update was left out (JSON lines, one a row)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt

from mrl.files import replace_file
from mrl.learner.batches import PreparedStep
from mrl.learner.step_order import StepOrder
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import Answer
from mrl.sharing.regime import Rescue
from mrl.tasks.pool import TaskPool

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


def sample_writer(pool: TaskPool, telemetry: Telemetry) -> Callable[[int, PreparedStep], None]:
    """What a learner calls behind every step, to write samples of it."""

    def tell(step: int, shown: Answer | Rescue, prompt_id: str, **rest: Any) -> None:
        prompt, text = pool.prompt(prompt_id), shown.completion.decode("utf-8", errors="replace")
        telemetry.sample(step, task=prompt.task, prompt=prompt.text, completion=text, reward=shown.reward, **rest)

    def write(step: int, prepared: PreparedStep) -> None:
        group = prepared.groups[step % len(prepared.groups)]
        answer = group.answers[0]
        tell(step, answer, group.prompt_id, kind="rollout", rewards=answer.rewards, failure=answer.failure)
        for rescue in prepared.rescued[:1]:
            tell(step, rescue, rescue.prompt_id, kind="rescue", source=rescue.source)

    return write
