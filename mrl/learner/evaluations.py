"""The learner's part of evaluations: which versions are evaluated, and the reports of their results.

Workers answer the held-out prompts beside their other work; the learner waits for answers only after its last step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from mrl.learner.held_out_ledger import Evaluated
from mrl.learner.intake import Intake
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.evaluation_results import emit_evaluation
from mrl.metrics.telemetry import Telemetry
from mrl.records.evaluation_messages import EvaluationResult, result_name
from mrl.records.version import Version
from mrl.tasks.pool import Prompt

WAIT_SLICE_S = 0.2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Steps that are evaluated: the first and the last one on all held-out prompts, others on some."""

    prompts: Sequence[Prompt]
    every: int
    """Steps between evaluations; 0 for the first and the last step alone."""
    num_prompts: int
    """Prompts for steps in between; 0 takes all."""
    total_steps: int

    def prompts_at(self, step: int) -> Sequence[Prompt]:
        """Return the prompts to ask at a step; none where no evaluation is due."""
        if step in (0, self.total_steps):
            return self.prompts
        is_due = self.every > 0 and step % self.every == 0
        return self.prompts[: self.num_prompts or None] if is_due else ()


class Evaluations:
    """The evaluations of one policy; called by the learner's thread."""

    def __init__(
        self, intake: Intake, plan: EvaluationPlan, folder: Path, telemetry: Telemetry, *, bounds: WaitBounds
    ) -> None:
        """Results are files in `folder`. After the last step answers are awaited within `bounds`, as groups are."""
        self._intake, self._plan, self._folder, self._telemetry = intake, plan, folder, telemetry
        self._bounds = bounds

    def ask_when_due(self, version: Version) -> None:
        """Have a version evaluated, before it is announced, where an evaluation is due and has no result."""
        prompts = self._plan.prompts_at(version.step)
        if prompts and result_version(self._folder / result_name(self._telemetry.policy, version.step)) != version:
            self._intake.evaluate(version, prompts)

    def tell(self, wait_s: float = 0.0) -> None:
        """Report the evaluations that ended since the last call; wait at most `wait_s` for an answer."""
        for one in self._intake.evaluated(wait_s):
            self._tell(one)

    def await_last(self, stopping: Callable[[], bool]) -> None:
        """Wait for the evaluation under way, until it is over or no worker gets on any more; then report it.

        All steps are done, so that an evaluation without an end costs no more than its own result.
        """
        policy, began_s = self._telemetry.policy, time.monotonic()
        self._telemetry.doing("evaluating")
        with self._telemetry.awaiting("evaluation", whom=f"worker/{policy}", bound_s=self._bounds.data_timeout_s):
            while self._intake.is_evaluating and not stopping():
                if why := self._intake.given_up(self._bounds, began_s):
                    log.error("evaluation abandoned", policy=policy, reason=why)
                    break
                self.tell(WAIT_SLICE_S)
        if not stopping():  # else what came so far would pass for the result
            self._intake.stop_evaluating()
        self.tell()

    def _tell(self, one: Evaluated) -> None:
        if one.result is None:
            log.error("no held-out prompt was answered", version=str(one.version), **one.failures)
            return
        if one.result.missing:
            log.warning(
                "held-out prompts without an answer",
                version=str(one.version),
                missing=one.result.missing,
                **one.failures,
            )
        try:
            emit_evaluation(one.result, self._folder, self._telemetry)
        except OSError as error:
            log.error("evaluation result not written", version=str(one.version), reason=str(error))


def result_version(path: Path) -> Version | None:
    """Return the version of an evaluation result; None when there is no result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvaluationResult).version
    except (OSError, msgspec.DecodeError):
        return None
