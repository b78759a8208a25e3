"""The evaluation of a policy that does not learn: once, between the score requests of its peers."""

import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from mrl.errors import EngineLost
from mrl.metrics.evaluation_results import tell_evaluation
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer
from mrl.records.version import Version
from mrl.rollout.groups_in_flight import Flights
from mrl.rollout.held_out_answers import HeldOutShare, InFlight
from mrl.rollout.sampling import Sampler
from mrl.rollout.verifying import Verifying
from mrl.tasks.held_out import HeldOutBook
from mrl.tasks.pool import Prompt

SLICE_S = 0.05

log = structlog.get_logger()


class FrozenEvaluation:
    """Held-out answers of one version, sampled in slices of time."""

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
        success_reward: float = 1.0,
    ) -> None:
        """At most `max_answers` are in flight, `share` of them beside other work; the result is a file of `folder`."""
        self._sampler, self._telemetry, self._folder, self._max_answers = sampler, telemetry, folder, max_answers
        self._book = HeldOutBook(
            sampler.policy, version, prompts, began_s=time.monotonic(), success_reward=success_reward
        )
        self._share = HeldOutShare(share, group_size=0)  # the other work comes one request after another
        self._flights, self._verifying = Flights(sampler), Verifying(sampler, telemetry)
        self._is_over = False

    def go_on(self, *, beside: bool) -> bool:
        """Sample for a slice of time, `beside` other work of the engine or alone; False once there is nothing to do.

        Raises EngineLost.
        """
        if self._is_over:
            return False
        self._telemetry.doing("evaluating")
        try:
            room = self._share.room(self._max_answers, InFlight(0, self._flights.num_answers))
            items = self._book.grant("", room.beside if beside else room.alone)
            if items:
                self._sampler.engine.submit(self._flights.depart(items))
            self._verifying.hand_in(self._flights.arrive(self._sampler.engine.collect(SLICE_S)))
        except EngineLost:
            self._flights.lose()
            self._book.lose(lambda _, ticket: True)
            raise
        for answer in self._verifying.done(to_the_last=not self._flights):
            assert isinstance(answer, HeldOutAnswer), "nothing else is in flight"
            self._book.accept(answer)
        if self._book.is_over:
            self._tell()
        return True

    def give_up(self) -> None:
        """End with the worker: answers that are still to come are told as missing, aloud, where there are any.

        There is no result: what came so far would pass for one. A resumed run evaluates anew.
        """
        if self._is_over:
            return
        self._is_over, missing = True, self._book.num_missing
        log.error("evaluation given up", policy=self._sampler.policy, reason="the worker ends", missing=missing)
        self._telemetry.metrics(self._book.version.step, {"eval/missing_answers": missing})

    def _tell(self) -> None:
        self._is_over = True
        result, failures = self._book.result(time.monotonic()), self._book.failures()
        if result is None or result.missing:
            log.warning("held-out prompts without an answer", policy=self._sampler.policy, **failures)
        if result is not None:
            tell_evaluation(result, self._folder, self._telemetry)
