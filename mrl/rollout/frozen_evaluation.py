"""Evaluation of a policy that does not learn: once, between score requests of its peers."""

import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from mrl.metrics.evaluation_results import emit_evaluation
from mrl.metrics.telemetry import Telemetry
from mrl.records.version import Version
from mrl.rollout.held_out_answers import HeldOutShare, InFlight
from mrl.rollout.held_out_pass import HeldOutPass
from mrl.rollout.sampling import Sampler
from mrl.tasks.held_out import PLAIN, HeldOutTally, Measure
from mrl.tasks.pool import Prompt

log = structlog.get_logger()


class FrozenEvaluation:
    """Evaluation of one version, whose held-out answers are sampled in slices of time."""

    def __init__(
        self,
        sampler: Sampler,
        telemetry: Telemetry,
        version: Version,
        prompts: Sequence[Prompt],
        *,
        folder: Path,
        max_answers: int,
        share: float,
        measure: Measure = PLAIN,
    ) -> None:
        """At most `max_answers` are in flight, `share` of that beside other work; the result is a file in `folder`."""
        self._sampler, self._telemetry, self._folder, self._max_answers = sampler, telemetry, folder, max_answers
        self._book = HeldOutTally(sampler.policy, version, prompts, began_s=time.monotonic(), measure=measure)
        self._share = HeldOutShare(share, group_size=0)  # the other work comes one request after another
        self._pass = HeldOutPass(sampler, telemetry, self._book)
        self._is_over = False

    def go_on(self, *, beside: bool) -> bool:
        """Sample for a slice of time, `beside` other work of the engine or alone; False once there is nothing to do.

        Raises EngineLost.
        """
        if self._is_over:
            return False
        self._telemetry.doing("evaluating")
        room = self._share.room(self._max_answers, InFlight(0, self._pass.in_flight))
        self._pass.go_on(room.beside if beside else room.alone)
        if self._book.is_over:
            self._tell()
        return True

    def give_up(self) -> None:
        """End the evaluation, since the worker ends; log and count the answers that are still missing.

        There is no result: a partial one would pass for a whole one. A resumed run evaluates anew.
        """
        if self._is_over:
            return
        self._is_over, missing = True, self._book.num_missing
        log.error("evaluation abandoned", policy=self._sampler.policy, reason="the worker is stopping", missing=missing)
        self._telemetry.metrics(self._book.version.step, {"eval/missing_answers": missing})

    def _tell(self) -> None:
        self._is_over = True
        result, failures = self._book.result(time.monotonic()), self._book.failures()
        if result is None or result.missing:
            log.warning("held-out prompts without an answer", policy=self._sampler.policy, **failures)
        if result is not None:
            emit_evaluation(result, self._folder, self._telemetry)
