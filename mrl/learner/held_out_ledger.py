"""Ledger of evaluations: which are under way, and which worker answers which prompt. Without socket or clock.

Prompts are granted for one evaluation at a time, that of the newest version. When the next evaluation is due before the
end, the earlier one ends with the answers that have been begun: later answers would say little about its version.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mrl.records.evaluation_messages import EvaluationResult
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem, WorkRequest
from mrl.records.version import Version
from mrl.tasks.held_out import PLAIN, HeldOutTally, Measure
from mrl.tasks.pool import Prompt


class Evaluated(NamedTuple):
    """An evaluation that is over."""

    version: Version
    result: EvaluationResult | None
    """None when no prompt was answered."""
    failures: dict[str, int]
    """Reason why prompts have no answer -> number of prompts."""


class HeldOutLedger:
    """The evaluations of one policy; not thread-safe."""

    def __init__(self, policy: str, measure: Measure = PLAIN) -> None:
        self._policy, self._measure = policy, measure
        self._newest: HeldOutTally | None = None
        self._overtaken: list[HeldOutTally] = []
        """Earlier evaluations, whose last answers are still to come."""
        self._over: list[Evaluated] = []

    @property
    def is_open(self) -> bool:
        """Whether the newest evaluation is under way."""
        return self._newest is not None

    @property
    def waiting(self) -> Version | None:
        """Version of the evaluation that has prompts to grant; None without."""
        return self._newest.version if self._newest is not None and self._newest.num_waiting else None

    def ask(self, version: Version, prompts: Sequence[Prompt], now_s: float) -> None:
        """Evaluate a version from now on; an evaluation under way begins no more prompts."""
        if self._newest is not None:
            self._newest.give_up(running=False)
            self._overtaken.append(self._newest)
        self._newest = HeldOutTally(self._policy, version, prompts, began_s=now_s, measure=self._measure)
        self._settle(now_s)

    def lose(self, worker: str, holding: Collection[str], now_s: float) -> int:
        """Take back prompts that the worker does not hold (any more); return how many."""
        return self._lose(lambda who, ticket: who == worker and ticket not in holding, now_s)

    def expire(self, workers: Collection[str], now_s: float) -> int:
        """Take back prompts of silent workers; return how many."""
        return self._lose(lambda who, _: who in workers, now_s)

    def grant(self, request: WorkRequest) -> list[HeldOutItem]:
        """Return prompts for a worker that serves the evaluated version, or a newer one."""
        return self._grant(request, request.max_held_out)

    def grant_alone(self, request: WorkRequest, granted: int) -> list[HeldOutItem]:
        """Return more prompts for a worker without other work, which has just been granted `granted` prompts."""
        return self._grant(request, request.max_held_out_alone - granted)

    def accept(self, answers: Sequence[HeldOutAnswer], now_s: float) -> None:
        """Take in answers; repeated ones and those of an earlier life of the learner are ignored."""
        for answer in answers:
            for book in self._books():
                if book.accept(answer):
                    break
        self._settle(now_s)

    def give_up(self, now_s: float) -> None:
        """End all evaluations with the answers that have come."""
        for book in self._books():
            book.give_up(running=True)
        self._settle(now_s)

    def take_over(self) -> list[Evaluated]:
        """Return the evaluations that ended since the last call."""
        over, self._over = self._over, []
        return over

    def _books(self) -> list[HeldOutTally]:
        return [*self._overtaken, *([] if self._newest is None else [self._newest])]

    def _grant(self, request: WorkRequest, most: int) -> list[HeldOutItem]:
        if self._newest is None or request.serving is None or request.serving < self._newest.version:
            return []
        return self._newest.grant(request.worker, max(0, most))

    def _lose(self, is_lost: Callable[[str, str], bool], now_s: float) -> int:
        lost = sum(book.lose(is_lost) for book in self._books())
        for book in self._overtaken:
            book.give_up(running=False)
        self._settle(now_s)
        return lost

    def _settle(self, now_s: float) -> None:
        for book in self._books():
            if book.is_over:
                self._over.append(Evaluated(book.version, book.result(now_s), book.failures()))
        self._overtaken = [book for book in self._overtaken if not book.is_over]
        if self._newest is not None and self._newest.is_over:
            self._newest = None
