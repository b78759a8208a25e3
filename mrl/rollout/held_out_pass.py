"""Held-out prompts of one evaluation, answered by one engine in slices of time."""

from mrl.errors import EngineLost
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer
from mrl.rollout.groups_in_flight import GroupsInFlight
from mrl.rollout.sampling import Sampler
from mrl.rollout.verification import VerificationQueue
from mrl.tasks.held_out import HeldOutTally

SLICE_S = 0.05


class HeldOutPass:
    """Answers of one evaluation that one engine samples, or that are being verified."""

    def __init__(self, sampler: Sampler, telemetry: Telemetry, book: HeldOutTally) -> None:
        self._sampler, self._book = sampler, book
        self._flights, self._verifying = GroupsInFlight(sampler), VerificationQueue(sampler, telemetry)

    @property
    def in_flight(self) -> int:
        """Answers that the engine has been handed and that have not come."""
        return self._flights.num_answers

    def go_on(self, room: int) -> None:
        """Hand in at most `room` answers more, sample for a slice of time, and take in verified answers.

        Raises EngineLost; answers in flight then wait to be sampled again, a bounded number of times.
        """
        engine = self._sampler.engine
        try:
            items = self._book.grant("", room)
            if items:
                engine.submit(self._flights.depart(items))
            self._verifying.hand_in(self._flights.arrive(engine.collect(SLICE_S)))
        except EngineLost:
            self._flights.lose()
            self._book.lose(lambda _, ticket: True)
            raise
        for answer in self._verifying.done(to_the_last=not self._flights):
            assert isinstance(answer, HeldOutAnswer), "nothing else is in flight"
            self._book.accept(answer)
