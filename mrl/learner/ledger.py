"""Ledger of a learner: which worker samples which prompt, and which groups are ready. Without socket or clock.

Admission paces sampling: at most (eta + v + 1) * B groups are accepted or running (AReaL, arXiv 2505.24298, section 4).
Here eta is the staleness bound, B the groups of a step, and v the version under which the asking worker would sample.
Trained in the order in which they came, B a step, all of these are trained at step eta + v at the latest, when v is as
stale as it may be. An adaptive pace narrows this to what the learner needs in stock, so that it trains on fresher
groups. The staleness bound itself is enforced in `take_batch`.

Where groups are trained on again (`prompts.reuse`), B counts the fresh ones, and eta is smaller here by the versions
that are reserved for the others. With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) a group whose answers all
have one reward is not accepted, and the next prompt takes its place. With a curriculum, visits of the prompt order are
skipped. Continuations, states of peers to go on from, are granted before the next visit, and count as groups like any.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.learner.prompts.admission_window import AdmissionWindow
from mrl.learner.prompts.continuations import Continuations
from mrl.learner.prompts.curriculum import Curriculum
from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, Continuation, ScoredGroup, StaleGroup, WorkItem, WorkRequest, are_logprobs
from mrl.records.version import Version, is_void

MAX_GIVEN_BYTES = 2 * 1024 * 1024
"""Limit of peers' turns in one grant, which has to fit into a message; the last continuation may exceed it."""
UNBEGUN = "unbegun_groups/"
"""Prefix of the names of counts of continuations that did not begin; the reason follows."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits of sampling: B groups per step, at most `max_staleness_versions` ahead, `total_steps` in all.

    With `drop_uniform` groups of equal rewards are dropped, until `max_resampling` * B groups were sampled for a step.
    """

    groups_per_step: int
    group_size: int
    max_staleness_versions: int
    total_steps: int
    drop_uniform: bool = False
    max_resampling: float = 10.0
    adaptive: bool = False
    """Whether fewer groups are running and ready than the staleness bound allows, where the learner needs no more."""
    reserved_versions: int = 0
    """Versions of the staleness bound that admission leaves, for groups that are trained on again later."""

    @property
    def versions_ahead(self) -> int:
        """Number of versions ahead of training that may be sampled."""
        return self.max_staleness_versions - self.reserved_versions


@dataclass(slots=True)
class RunningGroup:
    """A granted group that has not come back."""

    position: int
    worker: str


@dataclass(slots=True)
class ReadyGroup:
    """A group that can be trained on, and how many batches were formed without it."""

    position: int
    group: ScoredGroup
    passed_over: int = 0


IsSettled = Callable[[ScoredGroup], bool]


def always(_group: ScoredGroup) -> bool:
    """Take every group for settled, as where no peer is waited for."""
    return True


@dataclass
class WorkLedger:
    """Grants positions of the prompt order, takes groups in, forms batches. One per policy; not thread-safe."""

    pace: SamplingLimits
    prompt_at: Callable[[int], str]
    """Prompt id at a position of the seeded pass over the pool."""
    resumed_at: Version
    step: int = 0
    cursor: int = 0
    accepted: int = 0
    """Groups trained on or ready."""
    dropped: int = 0
    """Uniform groups dropped since the last batch was taken."""
    returned: deque[int] = field(default_factory=deque)
    """Positions whose grant was lost; granted again first."""
    running: dict[str, RunningGroup] = field(default_factory=dict)
    ready: list[ReadyGroup] = field(default_factory=list)
    """Groups that can be trained on, in order of arrival."""
    last_seen_s: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_short: bool = False
    """Whether the worker that asked last had room for more than a worker with the newest weights may sample."""
    newest: Version | None = None
    """Version announced last; None before the first, when no worker can sample."""
    curriculum: Curriculum | None = None
    """Choice of the visits to skip; None skips none."""
    continuations: Continuations = field(default_factory=Continuations)

    def __post_init__(self) -> None:
        pace = self.pace
        window = AdmissionWindow(pace.groups_per_step, pace.versions_ahead)
        self.window: AdmissionWindow | None = window if pace.adaptive else None

    def capacity(self, serving: Version | None = None) -> int:
        """Return how many groups may be granted now, to a worker that would sample under `serving`, or the newest."""
        if serving is not None and is_void(serving, self.resumed_at):
            return 0
        step = self.step if serving is None else min(self.step, serving.step)
        ahead = min(step + self.pace.versions_ahead + 1, self.pace.total_steps)
        room = ahead * self.pace.groups_per_step - self.accepted - len(self.running)
        if self.window is not None:
            room = min(room, math.ceil(self.window.groups) - len(self.ready) - len(self.running))
        return max(0, room)

    def may_sample(self, serving: Version | None) -> bool:
        """Whether answers of a worker that serves this version can be trained on."""
        return serving is not None and not is_void(serving, self.resumed_at)

    def offer(self, found: Sequence[Continuation]) -> None:
        """Take in continuations, to have their groups sampled before the next visit of the order."""
        self.returned.extend(self.continuations.enter(found))

    def announced(self, version: Version) -> None:
        """Note that workers are told of this version from now on, and may sample for its step."""
        self.step = max(self.step, version.step)
        self.newest = version

    def grant(self, request: WorkRequest, now_s: float) -> list[WorkItem]:
        """Return work for one worker; take back work that it does not hold (any more), as after a restart."""
        self.last_seen_s[request.worker] = now_s
        holding = set(request.holding)
        self._take_back(lambda ticket, run: run.worker == request.worker and ticket not in holding)
        num_groups = min(request.max_groups, self.capacity(request.serving))
        self.is_short = self.capacity() < request.max_groups
        items = list[WorkItem]()
        while len(items) < num_groups and sum(map(_num_given_bytes, items)) < MAX_GIVEN_BYTES:
            items.append(self._grant_one(request))
        return items

    def expire(self, now_s: float, silence_s: float) -> set[str]:
        """Take back the work of workers that said nothing for `silence_s`; return their names."""
        silent = {worker for worker, seen_s in self.last_seen_s.items() if now_s - seen_s > silence_s}
        if silent:
            self._take_back(lambda _, run: run.worker in silent)
        for worker in silent:
            del self.last_seen_s[worker]
        return silent

    def accept(self, groups: Sequence[ScoredGroup], worker: str, now_s: float) -> list[ScoredGroup]:
        """Take finished groups over; return the new ones, uniform ones that are dropped included.

        A repeated or unknown ticket is counted and ignored. A group that is not what was granted, or that has a token
        without log-probability, or without a version that was announced, is counted and its prompt sampled again.
        """
        self.last_seen_s[worker] = now_s
        new = []
        for group in groups:
            position = self._claim(group.ticket)
            if position is None:
                self.counts["repeated"] += 1
            elif not self._is_sound(group, position):
                self.counts["unsound"] += 1
                self.returned.append(position)
            else:
                new.append(group)
                if self.curriculum is not None and group.continuation is None:
                    self.curriculum.note(position, group)
                if not self._drop_uniform(group):
                    self.ready.append(ReadyGroup(position, group))
                    self.accepted += 1
        return new

    def write_off(self, groups: Sequence[StaleGroup], worker: str, now_s: float) -> None:
        """Count groups that workers gave up, too stale or not begun; other groups take their places."""
        self.last_seen_s[worker] = now_s
        for group in groups:
            if self._claim(group.ticket) is None:
                self.counts["repeated"] += 1
            elif group.unbegun:
                self.counts[f"{UNBEGUN}{group.unbegun}"] += 1
            else:
                self._count_stale(group.num_tokens)

    def take_batch(self, step: int, is_settled: IsSettled = always, hold_versions: int = 0) -> list[ScoredGroup] | None:
        """Take out B groups that are fresh enough to train at `step`; None when there are too few.

        First come groups that cannot wait: at the staleness bound, or passed over in `hold_versions` batches. Then come
        settled groups, which gain nothing by waiting, and then the others. Each kind is in order of arrival.
        """
        chosen = self._choose(step, is_settled, hold_versions)
        if chosen is None:
            return None
        if self.window is not None:
            self.window.pull(len(self.ready))
        taken = {entry.position for entry in chosen}
        self.ready = [entry for entry in self.ready if entry.position not in taken]
        for entry in self.ready:
            entry.passed_over += 1
        self.dropped = 0
        if self.curriculum is not None:
            self.curriculum.formed()
        self.continuations.keep(set(self._open_positions()))
        return [entry.group for entry in chosen]

    def unsettled(self, step: int, is_settled: IsSettled = always, hold_versions: int = 0) -> int | None:
        """Return how many groups of the batch that `take_batch` would form are not settled; None without a batch."""
        chosen = self._choose(step, is_settled, hold_versions)
        return None if chosen is None else sum(not is_settled(entry.group) for entry in chosen)

    def adjust(self, *, short_wait_s: float, wait_s: float, period_s: float) -> None:
        """Adjust the window of an adaptive pace, after a batch.

        In the `period_s` since the last batch the learner waited `wait_s`, and `short_wait_s` of that while workers
        might not sample more.
        """
        if self.window is not None:
            self.window.adjust(short_wait_s, wait_s, period_s, num_replicas=len(self.last_seen_s))

    def state(self) -> dict[str, Any]:
        """Return the state for a resume, which samples positions again that are not yet trained on."""
        open_positions = self._open_positions()
        state = {"cursor": self.cursor, "open": sorted(open_positions), "dropped": self.dropped}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state(open_positions)
        if self.continuations.num_entered:
            self.continuations.keep(set(open_positions))
            state["continuations"] = self.continuations.state()
        return state

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on after `step` with the positions of a saved state."""
        self.cursor, self.returned, self.dropped = state["cursor"], deque(state["open"]), state["dropped"]
        self.step, self.accepted = step, step * self.pace.groups_per_step
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.restore(state["curriculum"])
        if "continuations" in state:
            self.continuations.restore(state["continuations"])

    def _open_positions(self) -> list[int]:
        running = [run.position for run in self.running.values()]
        return [entry.position for entry in self.ready] + running + list(self.returned)

    def _grant_one(self, request: WorkRequest) -> WorkItem:
        if self.returned:
            position = self.returned.popleft()
        else:
            position = self._next_taken()
            self.cursor = position + 1
        ticket = f"{self.resumed_at.run_epoch}.{position}"
        self.running[ticket] = RunningGroup(position, request.worker)
        return WorkItem(
            ticket=ticket,
            position=position,
            prompt_id=self._prompt_of(position),
            group_size=self.pace.group_size,
            step=self.step,
            continuation=self.continuations.at(position),
        )

    def _prompt_of(self, position: int) -> str:
        continuation = self.continuations.at(position)
        return self.prompt_at(position) if continuation is None else continuation.prompt_id

    def _next_taken(self) -> int:
        """Return the next position of the order that is not skipped."""
        position = self.cursor
        if self.curriculum is None:
            return position
        while not self.curriculum.takes(position, self.prompt_at(position)):
            if position - self.cursor >= self.curriculum.num_prompts:
                break
            position += 1
        self.counts["skipped_prompts"] += position - self.cursor
        return position

    def _claim(self, ticket: str) -> int | None:
        """Remove the grant of a ticket and return its position, also when it was taken back and not granted again."""
        run = self.running.pop(ticket, None)
        if run is not None:
            return run.position
        epoch, _, number = ticket.partition(".")
        is_number = number.removeprefix("-").isdigit()
        if epoch == str(self.resumed_at.run_epoch) and is_number and int(number) in self.returned:
            self.returned.remove(int(number))
            return int(number)
        return None

    def _is_sound(self, group: ScoredGroup, position: int) -> bool:
        is_whole = len(group.answers) == self.pace.group_size and group.prompt_id == self._prompt_of(position)
        is_whole &= group.continuation == self.continuations.at(position)
        has_prompt = len(group.prompt_token_ids) >= 4 and len(group.prompt_token_ids) % 4 == 0
        return is_whole and has_prompt and all(map(_is_usable, group.answers)) and not self._is_of_the_future(group)

    def _is_of_the_future(self, group: ScoredGroup) -> bool:
        """Whether the group names a version that was never announced: it would never count as stale."""
        newest = self.newest
        return newest is not None and any(span.version > newest for one in group.answers for span in one.versions)

    def _take_back(self, lost: Callable[[str, RunningGroup], bool]) -> None:
        for ticket in [ticket for ticket, run in self.running.items() if lost(ticket, run)]:
            self.returned.append(self.running.pop(ticket).position)
            self.counts["granted_again"] += 1

    def _choose(self, step: int, is_settled: IsSettled, hold_versions: int) -> list[ReadyGroup] | None:
        """Return the B entries of the batch of `step`, or None when too few are fresh enough."""
        self.step = step
        self._drop_stale(step)
        if len(self.ready) < self.pace.groups_per_step:
            return None

        def standing(entry: ReadyGroup) -> int:
            at_bound = step - entry.group.oldest.step >= self.pace.max_staleness_versions
            if at_bound or entry.passed_over >= hold_versions:
                return 0
            return 1 if is_settled(entry.group) else 2

        return sorted(self.ready, key=standing)[: self.pace.groups_per_step]

    def _drop_uniform(self, group: ScoredGroup) -> bool:
        """Whether a new group is to be dropped because all its rewards are equal; counts it if uniform."""
        if not self.pace.drop_uniform or not group.is_uniform:
            return False
        if self.dropped + 1 > (self.pace.max_resampling - 1) * self.pace.groups_per_step:
            self.counts["uniform_taken"] += 1
            return False
        self.dropped += 1
        self.counts["uniform_groups"] += 1
        self.counts["uniform_tokens"] += _num_tokens(group)
        return True

    def _drop_stale(self, step: int) -> None:
        fresh = []
        for entry in self.ready:
            stale = step - entry.group.oldest.step > self.pace.max_staleness_versions
            if stale or is_void(entry.group.oldest, self.resumed_at):
                self._count_stale(_num_tokens(entry.group))
                self.accepted -= 1
            else:
                fresh.append(entry)
        self.ready = fresh

    def _count_stale(self, num_tokens: int) -> None:
        self.counts["stale_groups"] += 1
        self.counts["stale_tokens"] += num_tokens


def _num_tokens(group: ScoredGroup) -> int:
    return sum(span.num_tokens for answer in group.answers for span in answer.versions)


def _num_given_bytes(item: WorkItem) -> int:
    return 0 if item.continuation is None else item.continuation.num_bytes


def _is_usable(answer: Answer) -> bool:
    """Whether every sampled token of the answer has a version and a valid log-probability."""
    num_tokens = len(answer.token_ids) // 4
    if num_tokens == 0 or len(answer.token_ids) % 4 or len(answer.logprobs) % 4:
        return False
    is_sampled = answer.is_sampled
    if is_sampled is not None and (len(is_sampled) != num_tokens or not is_sampled[-1] or not answer.has_sound_rows):
        return False
    num_sampled = num_tokens if is_sampled is None else int(is_sampled.sum())
    if answer.num_sampled_tokens != num_sampled or sum(span.num_tokens for span in answer.versions) != num_sampled:
        return False
    if answer.experts is not None and answer.experts.unpacked(num_sampled) is None:
        return False
    # With a log-probability that is not a number the loss would not be a number either.
    return are_logprobs(unpack_array(answer.logprobs, "f4"))
