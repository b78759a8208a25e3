"""Verification beside sampling: a thread hands complete groups to the verifiers and their results come as they come."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import ScoredGroup
from mrl.rollout.flights import Flight
from mrl.rollout.sampling import Sampler


class Verifying:
    """Groups that are being verified, in the order in which they were handed in."""

    def __init__(self, sampler: Sampler, telemetry: Telemetry) -> None:
        self._sampler, self._telemetry = sampler, telemetry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifying")
        self._pending: deque[Future[list[ScoredGroup]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def hand_in(self, flights: Sequence[Flight]) -> None:
        """Verify all answers of these groups together."""
        if flights:
            self._pending.append(self._thread.submit(self._score, flights))

    def done(self, *, wait: bool = False) -> list[ScoredGroup]:
        """What has been verified since the last call; with `wait`, all that was handed in."""
        groups: list[ScoredGroup] = []
        while self._pending and (wait or self._pending[0].done()):
            with self._telemetry.awaiting("verdicts", whom="verifiers"):
                groups += self._pending.popleft().result()
        return groups

    def close(self) -> None:
        """Wait for the batch under way."""
        self._thread.shutdown(cancel_futures=True)

    def _score(self, flights: Sequence[Flight]) -> list[ScoredGroup]:
        prompt_ids = [flight.item.prompt_id for flight in flights for _ in flight.answers]
        generations = [one for flight in flights for one in flight.generations]
        with self._telemetry.beside("verifying"):
            answers = iter(self._sampler.verified(prompt_ids, generations))
        return [
            self._sampler.group(flight.item, flight.prompt_token_ids, [next(answers) for _ in flight.answers])
            for flight in flights
        ]
