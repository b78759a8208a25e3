"""Verification beside sampling: complete groups go to the verifiers at once and come back with their last verdict."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import NamedTuple

import structlog

from mrl.engines.engine import Generation
from mrl.errors import RoleFailed
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem, ScoredGroup
from mrl.rollout.episode import PlayedEpisode
from mrl.rollout.groups_in_flight import GroupInFlight
from mrl.rollout.packed_experts import with_experts
from mrl.rollout.sampling import Sampler
from mrl.tasks.rewards import UNREADABLE
from mrl.tasks.verify import Verdict

MAX_REASON_CHARS = 500

log = structlog.get_logger()


class _Awaited(NamedTuple):
    flight: GroupInFlight
    verdicts: "Future[list[Verdict]]"
    since_s: float


class VerificationQueue:
    """Groups that are being verified. A slow verdict delays only its own group."""

    def __init__(self, sampler: Sampler, telemetry: Telemetry) -> None:
        self._sampler, self._telemetry = sampler, telemetry
        self._awaited: list[_Awaited] = []
        self._span = _SharedSpan(telemetry)
        self._told: set[tuple[str, str]] = set()
        """Tasks and kinds of failure of which the first failure was logged."""

    def __len__(self) -> int:
        return len(self._awaited)

    def hand_in(self, flights: Sequence[GroupInFlight]) -> None:
        """Begin to verify the answers of these groups; never waits.

        Where answers queue, those of the group that the engine got first come first: it would be too stale first.
        """
        for flight in flights:
            verdicts = self._sampler.verdicts(flight.item.prompt_id, flight.generations, rank=flight.number)
            self._span.enter()
            verdicts.add_done_callback(lambda _: self._span.leave())
            self._awaited.append(_Awaited(flight, verdicts, time.monotonic()))

    def done(self, *, to_the_last: bool = False) -> list[ScoredGroup | HeldOutAnswer]:
        """Return what was verified since the last call, in the order of handing in; `to_the_last` waits for all.

        Raises RoleFailed when a task's verifier cannot be started; a held-out answer is returned as failed instead.
        """
        if to_the_last and self._awaited:
            with self._telemetry.awaiting("verdicts", whom=self.awaited, since_s=self.awaited_since_s):
                wait([one.verdicts for one in self._awaited])
        settled, awaited = list[_Awaited](), list[_Awaited]()
        for one in self._awaited:
            (settled if one.verdicts.done() else awaited).append(one)
        self._awaited = awaited
        return [self._scored(one) for one in settled]

    @property
    def awaited(self) -> str:
        """Name of the verifier that is awaited longest."""
        task = self._sampler.pool.prompt(self._awaited[0].flight.item.prompt_id).task if self._awaited else ""
        return f"the verifier of {task}"

    @property
    def awaited_since_s(self) -> float | None:
        """`time.monotonic` at which the answers that wait longest were handed in; None where none wait."""
        return self._awaited[0].since_s if self._awaited else None

    def _scored(self, awaited: _Awaited) -> ScoredGroup | HeldOutAnswer:
        flight, verdicts, _ = awaited
        if not verdicts.exception():
            self._tell_failures(flight, verdicts.result())
        if isinstance(flight.item, HeldOutItem):
            return self._held_out(flight.item, flight.generations[0], verdicts)
        answers = self._sampler.answers(flight.generations, verdicts.result())
        first = flight.generations[0]
        if isinstance(first, PlayedEpisode):
            group = self._sampler.group(flight.item, first.prompt_token_ids, answers, opening=first.opening)
        else:
            group = self._sampler.group(flight.item, flight.prompt_token_ids, answers)
        return with_experts(group, flight.generations)

    def _tell_failures(self, flight: GroupInFlight, verdicts: Sequence[Verdict]) -> None:
        """Log the first failure of every kind in a task, and show the answer that caused it."""
        prompt = self._sampler.pool.prompt(flight.item.prompt_id)
        for verdict in verdicts:
            if not verdict.failure or (prompt.task, verdict.failure) in self._told:
                continue
            self._told.add((prompt.task, verdict.failure))
            say = log.info if verdict.failure == UNREADABLE else log.warning
            say("verifier failed", task=prompt.task, kind=verdict.failure, reason=verdict.words)
            self._telemetry.sample(
                max((version.step for version in flight.versions), default=0),
                kind="unjudged",
                task=prompt.task,
                prompt=prompt.text,
                completion=verdict.extracted,
                reward=verdict.reward,
                failure=f"{verdict.failure}: {verdict.words}",
            )

    def _held_out(self, item: HeldOutItem, generation: Generation, verdicts: "Future[list[Verdict]]") -> HeldOutAnswer:
        """Return a scored held-out answer, or one that has failed where it cannot be judged."""
        if not generation.token_ids.size:
            words = generation.verdict.words if isinstance(generation, PlayedEpisode) else ""
            return HeldOutAnswer(ticket=item.ticket, failure=words or "refused by the engine")
        try:
            return self._sampler.held_out(item, generation, verdicts.result()[0])
        except RoleFailed as error:
            return HeldOutAnswer(ticket=item.ticket, failure=str(error)[:MAX_REASON_CHARS])


class _SharedSpan:
    """Telemetry of the time in which any group is being verified. From any thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._inside = 0
        self._open = ExitStack()

    def enter(self) -> None:
        """Count one more group."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._open.enter_context(self._telemetry.beside("verifying"))

    def leave(self) -> None:
        """Count one group less."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._open.close()
