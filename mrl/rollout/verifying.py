"""Verification beside sampling: complete groups go to the verifiers at once and come back with their last verdict."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import ScoredGroup
from mrl.rollout.flights import Flight
from mrl.rollout.sampling import Sampler
from mrl.tasks.verify import Verdict


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

    def done(self, *, wait: bool = False) -> list[ScoredGroup]:
        """The groups verified since the last call; with `wait`, all that were handed in. In the order of handing in.

        Raises RoleFailed when a task's verifier cannot be started.
        """
        if wait and self._awaited:
            with self._telemetry.awaiting("verdicts", whom="verifiers"):
                for one in self._awaited:
                    one.verdicts.result()
        settled, awaited = list[_Awaited](), list[_Awaited]()
        for one in self._awaited:
            (settled if one.verdicts.done() else awaited).append(one)
        self._awaited = awaited
        return [self._scored(*one) for one in settled]

    def _scored(self, flight: Flight, verdicts: "Future[list[Verdict]]") -> ScoredGroup:
        answers = self._sampler.answers(flight.generations, verdicts.result())
        return self._sampler.group(flight.item, flight.prompt_token_ids, answers)


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
