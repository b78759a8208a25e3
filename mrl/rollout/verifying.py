"""Verification beside sampling: complete groups go to the verifiers at once and come back with their last verdict."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import NamedTuple

from mrl.engines.engine import Generation
from mrl.errors import RoleFailed
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem, ScoredGroup
from mrl.rollout.flights import Flight
from mrl.rollout.sampling import Sampler
from mrl.tasks.verify import Verdict

MAX_REASON_CHARS = 500


class _Awaited(NamedTuple):
    flight: Flight
    verdicts: "Future[list[Verdict]]"


class Verifying:
    """Groups that are being verified. A slow verdict holds up its own group alone."""

    def __init__(self, sampler: Sampler, telemetry: Telemetry) -> None:
        self._sampler, self._telemetry = sampler, telemetry
        self._awaited: list[_Awaited] = []
        self._span = _SharedSpan(telemetry)

    def __len__(self) -> int:
        return len(self._awaited)

    def hand_in(self, flights: Sequence[Flight]) -> None:
        """Verify the answers of these groups; never waits.

        Where answers queue, the group that departed first comes first: it is the first that would be too stale.
        """
        for flight in flights:
            verdicts = self._sampler.verdicts(flight.item.prompt_id, flight.generations, rank=flight.number)
            self._span.enter()
            verdicts.add_done_callback(lambda _: self._span.leave())
            self._awaited.append(_Awaited(flight, verdicts))

    def done(self, *, to_the_last: bool = False) -> list[ScoredGroup | HeldOutAnswer]:
        """What was verified since the last call; `to_the_last`: all that was handed in. In the order of handing in.

        Raises RoleFailed when a task's verifier cannot be started; a held-out answer has failed then.
        """
        if to_the_last and self._awaited:
            with self._telemetry.awaiting("verdicts", whom="verifiers"):
                wait([one.verdicts for one in self._awaited])
        settled, awaited = list[_Awaited](), list[_Awaited]()
        for one in self._awaited:
            (settled if one.verdicts.done() else awaited).append(one)
        self._awaited = awaited
        return [self._scored(*one) for one in settled]

    def _scored(self, flight: Flight, verdicts: "Future[list[Verdict]]") -> ScoredGroup | HeldOutAnswer:
        if isinstance(flight.item, HeldOutItem):
            return self._held_out(flight.item, flight.generations[0], verdicts)
        answers = self._sampler.answers(flight.generations, verdicts.result())
        return self._sampler.group(flight.item, flight.prompt_token_ids, answers)

    def _held_out(self, item: HeldOutItem, generation: Generation, verdicts: "Future[list[Verdict]]") -> HeldOutAnswer:
        """One that cannot be judged costs itself."""
        if not generation.token_ids.size:
            return HeldOutAnswer(ticket=item.ticket, failure="refused by the engine")
        try:
            return self._sampler.held_out(item, generation, verdicts.result()[0])
        except RoleFailed as error:
            return HeldOutAnswer(ticket=item.ticket, failure=str(error)[:MAX_REASON_CHARS])


class _SharedSpan:
    """The span of time in which anything is verified, however many groups at once; any thread."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._inside = 0
        self._open = ExitStack()

    def enter(self) -> None:
        """One more group."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._open.enter_context(self._telemetry.beside("verifying"))

    def leave(self) -> None:
        """One group less."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._open.close()
