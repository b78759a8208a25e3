"""Groups on their way through the engine: in flight, complete, and complete with their weights proved."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import structlog

from mrl.engines.engine import FinishedAnswer, Generation, GenerationRequest
from mrl.errors import RoleFailed
from mrl.records.rollouts import HeldOutItem, StaleGroup, WorkItem
from mrl.records.version import Version
from mrl.rollout.episode import PlayedEpisode
from mrl.rollout.sampling import Sampler
from mrl.tasks.environments.contract import GIVEN_UP

Item = WorkItem | HeldOutItem
MAX_UNBEGUN_IN_A_ROW = 20
MOST_REASONS = 3
FRUITLESS_S = 30.0
"""Seconds in which only given-up groups come before a warning is logged, and logged again."""

log = structlog.get_logger()


@dataclass
class GroupInFlight:
    """One group in the engine, or one answer to a held-out prompt."""

    number: int
    """Place in the order in which items went to the engine."""
    item: Item
    prompt_token_ids: npt.NDArray[np.int32]
    answers: dict[int, Generation] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all answers have come."""
        return len(self.answers) == self.item.group_size

    @property
    def generations(self) -> list[Generation]:
        """Answers of a complete group, by the place of their seed."""
        return [self.answers[index] for index in range(self.item.group_size)]

    @property
    def has_begun(self) -> bool:
        """Whether every answer of a complete group has a token."""
        return all(generation.token_ids.size for generation in self.generations)

    @property
    def versions(self) -> set[Version]:
        """Versions that sampled any token of it."""
        return {span.version for generation in self.answers.values() for span in generation.versions}


class GroupsInFlight:
    """Groups and held-out answers that one engine was handed and has not finished. Groups complete out of order."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._numbers = itertools.count()
        self._flying: dict[str, GroupInFlight] = {}

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def num_answers(self) -> int:
        """Answers that have not come."""
        return sum(flight.item.group_size - len(flight.answers) for flight in self._flying.values())

    @property
    def num_held_out(self) -> int:
        """Answers to held-out prompts that have not come."""
        return sum(isinstance(flight.item, HeldOutItem) for flight in self._flying.values())

    @property
    def requests(self) -> list[str]:
        """Ids of the requests in flight."""
        return list(self._flying)

    def depart(self, items: Sequence[Item]) -> list[GenerationRequest]:
        """Put items in flight, and return the requests to submit; a repeated item gets a new request id."""
        requests = []
        for item, number in zip(items, self._numbers, strict=False):
            request = self._sampler.request(item, f"{item.ticket}#{number}")
            self._flying[request.request_id] = GroupInFlight(number, item, request.prompt_token_ids)
            requests.append(request)
        return requests

    def arrive(self, finished: Iterable[FinishedAnswer]) -> list[GroupInFlight]:
        """Take in answers; return the groups that they complete, in the order of their last answers."""
        complete = []
        for one in finished:
            flight = self._flying[one.request_id]
            flight.answers[one.index] = one.generation
            if flight.is_complete:
                complete.append(self._flying.pop(one.request_id))
        return complete

    def give_up_stale(self, newest: Version, max_staleness_versions: int) -> dict[str, StaleGroup]:
        """Forget and return, by request id, groups that can only end too stale for a learner at version `newest`.

        A group of which no answer with a token has come stays: only the engine knows under which version it began.
        """
        found = {}
        for request_id, flight in list(self._flying.items()):
            if newest.step - min(flight.versions, default=newest).step > max_staleness_versions:
                num_tokens = sum(answer.logprobs.size for answer in flight.answers.values())
                found[request_id] = StaleGroup(ticket=flight.item.ticket, num_tokens=num_tokens)
                del self._flying[request_id]
        return found

    def give_up_beyond(self, num_answers: int) -> dict[str, Item]:
        """Forget and return, by request id, the youngest groups, until at most `num_answers` are in flight."""
        found = {}
        while self.num_answers > num_answers:
            request_id, flight = self._flying.popitem()
            found[request_id] = flight.item
        return found

    def lose(self) -> list[Item]:
        """Forget everything in flight; return the items, which have to be sampled again."""
        items = [flight.item for flight in self._flying.values()]
        self._flying.clear()
        return items


class UnstartedGroups:
    """Sorts out groups in which an episode had no turn, because its environment did not begin, or was given up.

    Where no other groups come for long, a warning is logged, again and again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._in_a_row = clock, 0
        self._given_up: Counter[str] = Counter()
        """Reason -> groups given up since the last group that began."""
        self._since_s = self._told_s = 0.0
        """When the first of these groups came, and when the last warning was logged."""

    def sort(self, flights: Sequence[GroupInFlight]) -> tuple[list[GroupInFlight], list[StaleGroup]]:
        """Return groups that began, with all held-out answers, and a message for each other group: it is given up.

        A group whose peer's turns cannot be played again, or whose episode was given up from outside, does not count
        as one whose environment did not begin.

        Raises RoleFailed where environments do not begin again and again.
        """
        begun, given_up = list[GroupInFlight](), list[StaleGroup]()
        for flight in flights:
            if isinstance(flight.item, HeldOutItem) or flight.has_begun:
                begun.append(flight)
                self._in_a_row = 0
                if isinstance(flight.item, WorkItem):
                    self._given_up.clear()
                continue
            failed = next(one for one in flight.generations if not one.token_ids.size)
            reason = _why(failed)
            if flight.item.continuation is not None:
                unbegun = failed.ending if isinstance(failed, PlayedEpisode) else "refused"
                given_up.append(StaleGroup(ticket=flight.item.ticket, num_tokens=0, unbegun=unbegun))
                log.info("replay of a peer's turns failed", prompt=flight.item.prompt_id, reason=reason)
                continue
            given_up.append(StaleGroup(ticket=flight.item.ticket, num_tokens=0))
            if isinstance(failed, PlayedEpisode) and failed.ending == GIVEN_UP:
                log.warning("episode abandoned, and its group too", prompt=flight.item.prompt_id, reason=reason)
                if not self._given_up:
                    self._since_s = self._told_s = self._clock()
                self._given_up[reason] += 1
                continue
            self._in_a_row += 1
            log.warning("environment failed to start", prompt=flight.item.prompt_id, reason=reason)
            if self._in_a_row >= MAX_UNBEGUN_IN_A_ROW:
                raise RoleFailed(f"environments failed to start {self._in_a_row} times in a row: {reason}")
        self._tell()
        return begun, given_up

    def _tell(self) -> None:
        """Warn a person that no group comes: processes that wait for groups do not know why."""
        now_s = self._clock()
        if self._given_up and now_s - self._told_s >= FRUITLESS_S:
            self._told_s = now_s
            log.warning(
                "no group completed: episodes of agents are abandoned",
                since_s=round(now_s - self._since_s),
                groups="; ".join(
                    f"{count} abandoned: {reason}" for reason, count in self._given_up.most_common(MOST_REASONS)
                ),
                cure="see the gateway's log for why agents stop; an agent may be silent for gateway.idle_s at most",
            )


def _why(unbegun: Generation) -> str:
    words = unbegun.verdict.words if isinstance(unbegun, PlayedEpisode) else ""
    return words or "the engine refused the first turn"


class UnprovedGroups:
    """Complete groups that wait until every version that sampled a token of them is proved."""

    def __init__(self) -> None:
        self._good: set[Version] = set()
        self._held: list[GroupInFlight] = []

    def __len__(self) -> int:
        return len(self._held)

    def is_good(self, version: Version | None) -> bool:
        """Whether the engine has proved that it serves this version."""
        return version in self._good

    def hold(self, flights: Iterable[GroupInFlight]) -> None:
        """Take in complete groups."""
        self._held += flights

    def passed(self, version: Version) -> None:
        """Note that the engine has proved that it serves this version."""
        self._good.add(version)

    def release(self) -> list[GroupInFlight]:
        """Return the groups whose versions are all proved, in the order in which they came."""
        free = [flight for flight in self._held if flight.versions <= self._good]
        self._held = [flight for flight in self._held if not flight.versions <= self._good]
        return free

    def refuse(self) -> list[Item]:
        """Forget the groups that wait for a proof; return their items, which have to be sampled again."""
        items = [flight.item for flight in self._held]
        self._held.clear()
        return items
