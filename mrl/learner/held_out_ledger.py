"""Which evaluations are under way, and who answers their prompts: without socket or clock.

One evaluation at a time is granted, that of the newest version asked for. When the next one is due before it is over,
it ends with the answers that have been begun: later ones would say little about its version.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mrl.records.evaluation_messages import EvaluationResult
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem, WorkRequest
from mrl.records.version import Version
from mrl.tasks.held_out import PLAIN, HeldOutBook, Measure
from mrl.tasks.pool import Prompt


class Evaluated(NamedTuple):
    """An evaluation that is over."""

    version: Version
    result: EvaluationResult | None
    """None when no prompt was answered."""
    failures: dict[str, int]
    """Why prompts have no answer -> how many."""


class HeldOutLedger:
    """The evaluations of one policy; not thread-safe."""

    def __init__(self, policy: str, measure: Measure = PLAIN) -> None:
        self._policy, self._measure = policy, measure
        self._newest: HeldOutBook | None = None
        self._overtaken: list[HeldOutBook] = []
        """Those whose last answers are still to come."""
        self._over: list[Evaluated] = []

    @property
    def is_open(self) -> bool:
        """Whether the newest evaluation is under way."""
        return self._newest is not None

    @property
    def waiting(self) -> Version | None:
        """The version of which prompts wait that nobody has been granted yet."""
        return self._newest.version if self._newest is not None and self._newest.num_waiting else None

    def ask(self, version: Version, prompts: Sequence[Prompt], now_s: float) -> None:
        """Evaluate a version from now on; one that is under way begins no more prompts."""
        if self._newest is not None:
            self._newest.give_up(running=False)
            self._overtaken.append(self._newest)
        self._newest = HeldOutBook(self._policy, version, prompts, began_s=now_s, measure=self._measure)
        self._settle(now_s)

    def lose(self, worker: str, holding: Collection[str], now_s: float) -> int:
        """What the worker does not hold (any more) waits again; returns how many prompts."""
        return self._lose(lambda who, ticket: who == worker and ticket not in holding, now_s)

    def expire(self, workers: Collection[str], now_s: float) -> int:
        """What silent workers have waits again; returns how many prompts."""
        return self._lose(lambda who, _: who in workers, now_s)

    def grant(self, request: WorkRequest) -> list[HeldOutItem]:
        """Prompts for a worker that serves the version asked for, or a newer one."""
        return self._grant(request, request.max_held_out)

    def grant_alone(self, request: WorkRequest, granted: int) -> list[HeldOutItem]:
        """More, where there is no other work for the worker; `granted` it has just been granted."""
        return self._grant(request, request.max_held_out_alone - granted)

    def accept(self, answers: Sequence[HeldOutAnswer], now_s: float) -> None:
        """Take answers in; repeated ones and those of an earlier life are ignored."""
        for answer in answers:
            for book in self._books():
                if book.accept(answer):
                    break
        self._settle(now_s)

    def give_up(self, now_s: float) -> None:
        """Await nothing any more: what is under way is over with what has come."""
        for book in self._books():
            book.give_up(running=True)
        self._settle(now_s)

    def take_over(self) -> list[Evaluated]:
        """The evaluations that ended since the last call."""
        over, self._over = self._over, []
        return over

    def _books(self) -> list[HeldOutBook]:
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
