"""A worker's side of the link to its learner: work that was granted, and groups that are not yet acknowledged.

Each group is encoded once, and sent until it is acknowledged; its ticket makes repetitions harmless.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from mrl.records.codec import encode
from mrl.records.rollouts import (
    MAX_GROUP_BYTES,
    Goodbye,
    Groups,
    HeldOutAnswer,
    HeldOutAnswers,
    HeldOutItem,
    ScoredGroup,
    StaleGroup,
    WeightsNotice,
    WeightsRequest,
    WeightsRoute,
    WorkGrant,
    WorkItem,
    WorkRequest,
    learner_message_decoder,
)
from mrl.records.version import Version
from mrl.rollout.held_out_answers import HeldOutRoom
from mrl.transport.requests import RequestLink, Requests

REPEAT_S = 1.0
"""Seconds between a worker's requests, also while it samples: the learner grants a silent worker's work to others."""

Delivery = ScoredGroup | StaleGroup | HeldOutAnswer

log = structlog.get_logger()


class WorkerProgress(NamedTuple):
    """Progress of a worker, as its `WorkRequest` tells it."""

    num_done: int
    is_loading: bool


STARTING = WorkerProgress(0, is_loading=True)
ASLEEP = WorkerProgress(0, is_loading=False)


class WorkerLink:
    """Link of one worker to its learner.

    The worker's thread (`take_work`, `deliver`) and the socket's thread (`on_message`, `on_tick`) share it.
    """

    def __init__(
        self, worker: str, *, learner: str = "the learner", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker, self._clock = worker, clock
        self._changed = threading.Condition()
        self._is_nudged = False
        # Request numbers differ from those of an earlier process of this worker, to which answers may still come.
        self._requests = RequestLink(learner, Requests(first_number=1 + secrets.randbits(40)))
        self._work: dict[str, WorkItem | HeldOutItem] = {}
        self._taken: set[str] = set()
        """Tickets of work that `take_work` has returned."""
        self._undelivered: dict[str, int] = {}
        """Ticket -> number of the request that delivers it."""
        self._wanted, self._wanted_held_out = 0, HeldOutRoom()
        self.held_out_waiting: Version | None = None
        """Version whose evaluation still had held-out prompts to grant at the learner's last answer; None without."""
        self._serving: Version | None = None
        """Version that the engine would sample under, as of the last `take_work`."""
        self._progress: Callable[[], WorkerProgress] = lambda: STARTING
        self._asked_s = self.answered_s = float("-inf")
        """When the learner was asked for work last, and when it answered last."""
        self._notice: WeightsNotice | None = None
        self._weights_route: WeightsRoute | None = None
        self._ended = False
        self.is_over = False
        """Whether the learner has done all its steps: nothing more is asked of it, or delivered to it."""

    def open(self, post: Callable[[bytes], object], reconnect: Callable[[], object]) -> None:
        """Connect the link: `post` sends a message, `reconnect` looks the learner's address up again."""
        self._requests.open(post, reconnect)
        self._asked_s = self._clock()

    def tell(self, progress: Callable[[], WorkerProgress]) -> None:
        """Set the source of the progress that the learner is told, called from any thread; until then `STARTING`."""
        self._progress = progress

    @property
    def notice(self) -> WeightsNotice | None:
        """Newest weights that the learner announced; None before that."""
        with self._changed:
            return self._notice

    def take_work(
        self,
        max_groups: int,
        timeout_s: float,
        serving: Version | None = None,
        held_out: HeldOutRoom = HeldOutRoom(),  # noqa: B008 - a tuple
    ) -> list[WorkItem | HeldOutItem]:
        """Ask for up to `max_groups` more groups, to be sampled under `serving`, and return granted work, maybe none.

        Every item is returned once. Held-out prompts come first, and take the places of groups.

        Waits at most `timeout_s`; other weights that the learner announces, or a `nudge`, end the wait. At most one
        request is unanswered: the learner would take a second one for that of a worker that lost its first grant.
        """
        with self._changed:
            self._wanted, self._wanted_held_out = max_groups, held_out
            self._serving, told = serving, self._notice
            if not (self._is_asking or self._fresh() or self.is_over):
                self._ask()
            self._changed.wait_for(lambda: bool(self._fresh()) or self._notice != told or self._is_nudged, timeout_s)
            self._is_nudged = False
            taken, self._wanted, self._wanted_held_out = self._within(max_groups), 0, HeldOutRoom()
            self._taken.update(item.ticket for item in taken)
            return taken

    def deliver(self, groups: Sequence[Delivery]) -> None:
        """Send finished groups and held-out answers, or say that groups are given up; repeated until acknowledged.

        A group that is longer than a message may be is given up, too.
        """
        with self._changed:
            for group in groups:
                body = encode(self._message(group))
                if len(body) > MAX_GROUP_BYTES and isinstance(group, ScoredGroup):
                    told = {"task": group.task, "prompt": group.prompt_id, "bytes": len(body), "most": MAX_GROUP_BYTES}
                    cure = "lower rollout.group_size or rollout.max_new_tokens"
                    log.warning("group dropped: exceeds the message size limit", **told, cure=cure)
                    num_tokens = sum(answer.num_sampled_tokens for answer in group.answers)
                    body = encode(self._message(StaleGroup(ticket=group.ticket, num_tokens=num_tokens)))
                self._forget(group.ticket)
                if self.is_over:
                    continue
                self._undelivered[group.ticket] = self._requests.core.next_number
                self._requests.post(body, self._clock())

    def give_up(self, items: Sequence[WorkItem | HeldOutItem]) -> None:
        """Forget work items that cannot be done; the learner grants them anew."""
        with self._changed:
            for item in items:
                self._forget(item.ticket)

    def rest(self, within_s: float) -> None:
        """Give up all work before the worker sleeps, tell the learner, and wait for its answer, at most `within_s`.

        Groups that were sent and are not yet acknowledged are sent again when the worker wakes up.
        """
        with self._changed:
            self._work.clear()
            self._taken.clear()
            self._wanted, self._wanted_held_out = 0, HeldOutRoom()
            if not self.is_over:
                self._ask()
            self._changed.wait_for(lambda: not (self._is_asking or self._undelivered), within_s)
            self._work.clear()  # granted meanwhile

    def begin_anew(self) -> None:
        """Begin as a new worker, after a sleep: forget the announced weights and the unanswered request for work."""
        with self._changed:
            self._notice, self._ended = None, False
            self._requests.core.forget(self._requests.core.newest_report)
            self._asked_s = self._clock()

    def ask_weights(
        self,
        version: Version,
        *,
        num_ranks: int,
        gpu: str = "",
        nccl: str = "",
        within_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> WeightsRoute | None:
        """Ask how to get a version, by broadcast to `num_ranks` ranks or, with 0, in files; wait for the answer.

        Returns None when no answer comes within `within_s`, the link has ended, the learner has done all its steps, or
        `is_wanted` is false when `wake` has it looked at again.
        Another thread than the worker's may call it, one call at a time.
        """
        with self._changed:
            if self.is_over:
                return None
            attempt = self._requests.core.next_number
            request = WeightsRequest(
                worker=self._worker, version=version, attempt=attempt, num_ranks=num_ranks, gpu=gpu, nccl=nccl
            )
            self._weights_route = None
            self._requests.post(encode(request), self._clock())
            self._changed.wait_for(
                lambda: self._weights_route is not None or self._is_ending or not is_wanted(), within_s
            )
            self._requests.core.forget(attempt)
            return self._weights_route

    def wake(self) -> None:
        """Make a waiting `ask_weights` look again whether its version is wanted."""
        with self._changed:
            self._changed.notify_all()

    def nudge(self) -> None:
        """End a wait of `take_work`, since the worker has something else to look at. From any thread."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def end(self) -> None:
        """End a wait of `ask_weights`, and every later one, at once."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def on_message(self, body: bytes) -> None:
        """Take in an answer of the learner."""
        message = self._requests.read(body, learner_message_decoder)
        if message is None:
            return
        with self._changed:
            now_s = self.answered_s = self._clock()
            if isinstance(message, Goodbye):
                self._take_leave(now_s)
                self._changed.notify_all()
                return
            self._notice = message.weights or self._notice
            if isinstance(message, WorkGrant):
                self._requests.answered(self._requests.core.newest_report, now_s)
                items: list[WorkItem | HeldOutItem] = [*message.held_out, *message.items]
                self._work.update({item.ticket: item for item in items if item.ticket not in self._undelivered})
                self.held_out_waiting = message.held_out_waiting
            elif isinstance(message, WeightsRoute):
                if self._requests.answered(message.attempt, now_s):
                    self._weights_route = message
            else:
                for ticket in message.tickets:
                    self._requests.answered(self._undelivered.pop(ticket, None), now_s)
            self._changed.notify_all()

    def on_tick(self, now_s: float) -> None:
        """Ask for work when it is time, and repeat unanswered requests; after long silence over a new connection."""
        with self._changed:
            if self.is_over:
                return
            if now_s - self._asked_s > REPEAT_S:
                self._ask()
            self._requests.on_tick(now_s)

    @property
    def _is_ending(self) -> bool:
        return self._ended or self.is_over

    def _take_leave(self, now_s: float) -> None:
        """Acknowledge the learner's goodbye, and await no answer any more."""
        self.is_over = True
        self._requests.report(encode(Goodbye(role=self._worker)), now_s)
        for number in (self._requests.core.newest_report, *self._undelivered.values()):
            self._requests.core.forget(number)
        self._undelivered.clear()
        self._work.clear()

    @property
    def _is_asking(self) -> bool:
        """Whether a request for work is unanswered."""
        return self._requests.core.asked_s(self._requests.core.newest_report) is not None

    def _ask(self) -> None:
        self._asked_s = self._clock()
        fresh, progress = self._fresh(), self._progress()
        num_held_out = sum(isinstance(item, HeldOutItem) for item in fresh)
        request = WorkRequest(
            worker=self._worker,
            max_groups=max(0, self._wanted - (len(fresh) - num_held_out)),
            holding=[*self._work, *self._undelivered],
            serving=self._serving,
            max_held_out=max(0, self._wanted_held_out.beside - num_held_out),
            max_held_out_alone=max(0, self._wanted_held_out.alone - num_held_out),
            progress=progress.num_done,
            is_loading=progress.is_loading,
        )
        self._requests.report(encode(request), self._asked_s)

    def _fresh(self) -> list[WorkItem | HeldOutItem]:
        return [item for ticket, item in self._work.items() if ticket not in self._taken]

    def _within(self, max_groups: int) -> list[WorkItem | HeldOutItem]:
        """Return work not yet taken that has room: all held-out prompts, and groups in the places that these leave."""
        held_out = [item for item in self._fresh() if isinstance(item, HeldOutItem)]
        groups = [item for item in self._fresh() if isinstance(item, WorkItem)]
        lost = math.ceil(len(held_out) / groups[0].group_size) if groups else 0
        return [*held_out, *groups[: max(0, max_groups - lost)]]

    def _forget(self, ticket: str) -> None:
        self._work.pop(ticket, None)
        self._taken.discard(ticket)

    def _message(self, group: Delivery) -> Groups | HeldOutAnswers:
        match group:
            case HeldOutAnswer():
                return HeldOutAnswers(worker=self._worker, answers=[group])
            case StaleGroup():
                return Groups(worker=self._worker, groups=[], stale=[group])
        return Groups(worker=self._worker, groups=[group])
