"""Results of an evaluation, written to the run folder and sent as telemetry."""

from pathlib import Path

import msgspec

from mrl.files import replace_file
from mrl.metrics.telemetry import Telemetry
from mrl.records.evaluation_messages import EvaluationResult


def emit_evaluation(result: EvaluationResult, folder: Path, telemetry: Telemetry) -> None:
    """Emit the numbers and sample answers of a result, and write its file into `folder`. Raises OSError."""
    values = {
        "eval/accuracy": result.accuracy,
        "eval/own_token_share": result.own_token_share,
        "eval/missing_answers": result.missing,
        "eval/time_s": result.seconds,
    }
    values |= {f"eval/accuracy/{task}": found.accuracy for task, found in result.per_task.items()}
    values |= {f"eval/{name}": found.mean for name, found in result.estimates.items()}
    if result.samples > 1:
        values["eval/tied_majorities"] = result.tied_majorities
    telemetry.metrics(result.step, values)
    for answer in result.answers:
        telemetry.sample(
            result.step,
            kind="evaluation",
            task=answer.task,
            prompt=answer.prompt,
            completion=answer.completion,
            reward=answer.reward,
            opening=answer.opening,
            turns=answer.turns,
        )
    replace_file(folder / result.file_name, msgspec.json.encode(result))
