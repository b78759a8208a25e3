"""The worker's side of the link to its learner: which work is held, which groups are not yet acknowledged.

Requests and groups are repeated until they are answered; tickets make every repetition harmless.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mrl.errors import RecordError
from mrl.records.codec import decode, encode
from mrl.records.rollouts import (
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

REPEAT_S = 1.0
"""A worker that samples for long says so as often, or the learner would grant its work to others."""
SILENCE_S = 3.0
MAX_BATCH, MAX_BATCH_BYTES = 1024, 4 * 1024 * 1024


Delivery = ScoredGroup | StaleGroup | HeldOutAnswer


class WorkerProgress(NamedTuple):
    """How far a worker is; see `WorkRequest`."""

    num_done: int
    is_loading: bool


STARTING = WorkerProgress(0, is_loading=True)
ASLEEP = WorkerProgress(0, is_loading=False)


class WorkerLink:
    """Shared between the worker's thread (`take_work`, `deliver`) and the socket's thread (`on_message`, `on_tick`)."""

    def __init__(self, worker: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._clock = worker, clock
        self._changed = threading.Condition()
        self._post: Callable[[bytes], object] = lambda _: None
        self._reconnect: Callable[[], object] = lambda: None
        self._work: dict[str, WorkItem | HeldOutItem] = {}
        self._taken: set[str] = set()
        """Tickets of work that the worker's thread has already got."""
        self._undelivered: dict[str, Delivery] = {}
        self._wanted, self._wanted_held_out = 0, HeldOutRoom()
        self.held_out_waiting: Version | None = None
        """The version of which held-out prompts waited when the learner answered last."""
        self._serving: Version | None = None
        """What the engine would sample under, as the worker's thread said last."""
        self._progress: Callable[[], WorkerProgress] = lambda: STARTING
        self._is_unanswered = False
        self._asked_s = self._heard_s = self._sent_s = self._weights_asked_s = float("-inf")
        self.answered_s = float("-inf")
        """When the learner answered last."""
        self._notice: WeightsNotice | None = None
        self._weights_request: WeightsRequest | None = None
        self._weights_route: WeightsRoute | None = None
        self._weights_attempts = secrets.randbits(40)  # none that an earlier life of this worker had
        self._ended = False
        self.malformed = 0

    def open(self, post: Callable[[bytes], object], reconnect: Callable[[], object]) -> None:
        """Give the link its voice: `post` sends a message, `reconnect` looks the learner's address up again."""
        self._post, self._reconnect = post, reconnect
        self._heard_s = self._asked_s = self._clock()

    def tell(self, progress: Callable[[], WorkerProgress]) -> None:
        """How the learner is told of the worker's progress; called from any thread. Before this its engine starts."""
        self._progress = progress

    @property
    def notice(self) -> WeightsNotice | None:
        """The newest weights that the learner told of."""
        with self._changed:
            return self._notice

    def take_work(
        self,
        max_groups: int,
        timeout_s: float,
        serving: Version | None = None,
        held_out: HeldOutRoom = HeldOutRoom(),  # noqa: B008 - a tuple
    ) -> list[WorkItem | HeldOutItem]:
        """Ask for up to `max_groups` more, to be sampled under `serving`; may be empty. Every item is given once.

        Held-out prompts come first, and take the places of groups.

        Waits at most `timeout_s`, and no longer than until the learner tells of other weights. There is one unanswered
        request at a time: the learner would take a second one for that of a worker that lost what the first one was
        granted.
        """
        with self._changed:
            self._wanted, self._wanted_held_out = max_groups, held_out
            self._serving, told = serving, self._notice
            if not self._is_unanswered and not self._fresh():
                self._ask()
            self._changed.wait_for(lambda: bool(self._fresh()) or self._notice != told, timeout_s)
            taken, self._wanted, self._wanted_held_out = self._within(max_groups), 0, HeldOutRoom()
            self._taken.update(item.ticket for item in taken)
            return taken

    def deliver(self, groups: Sequence[Delivery]) -> None:
        """Send finished groups and held-out answers, or say that groups are given up; repeated until acknowledged."""
        with self._changed:
            for group in groups:
                self._forget(group.ticket)
                self._undelivered[group.ticket] = group
            self._send(list(groups))

    def give_up(self, items: Sequence[WorkItem | HeldOutItem]) -> None:
        """Forget work that cannot be done; the learner grants it anew."""
        with self._changed:
            for item in items:
                self._forget(item.ticket)

    def rest(self, within_s: float) -> None:
        """Give up all work, and let the learner know, before the worker sleeps; its answer is awaited so long at most.

        What is delivered and not yet acknowledged is sent again when the worker wakes up.
        """
        with self._changed:
            self._work.clear()
            self._taken.clear()
            self._wanted, self._wanted_held_out = 0, HeldOutRoom()
            self._ask()
            self._changed.wait_for(lambda: not (self._is_unanswered or self._undelivered), within_s)
            self._work.clear()  # granted meanwhile

    def begin_anew(self) -> None:
        """Begin as a new worker would: what was told of weights before is old."""
        with self._changed:
            self._notice, self._is_unanswered, self._ended = None, False, False
            self._heard_s = self._asked_s = self._clock()

    def ask_weights(
        self,
        version: Version,
        *,
        num_ranks: int,
        gpu: str = "",
        within_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> WeightsRoute | None:
        """Ask how to come by a version, by broadcast to so many ranks or, with none, in files; waits for the answer.

        None when there is none in time, the link has ended, or `is_wanted` says no when it is looked at again (`wake`).
        Another thread than the worker's may ask, one at a time.
        """
        with self._changed:
            self._weights_attempts += 1
            self._weights_request = WeightsRequest(
                worker=self._worker, version=version, attempt=self._weights_attempts, num_ranks=num_ranks, gpu=gpu
            )
            self._weights_route = None
            self._post(encode(self._weights_request))
            self._weights_asked_s = self._clock()
            self._changed.wait_for(lambda: self._weights_route is not None or self._ended or not is_wanted(), within_s)
            self._weights_request = None
            return self._weights_route

    def wake(self) -> None:
        """Have whoever waits for weights look whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Wait for no weights any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def on_message(self, body: bytes) -> None:
        """Take an answer of the learner."""
        try:
            message = decode(body, learner_message_decoder)
        except RecordError:
            self.malformed += 1
            return
        with self._changed:
            self._heard_s = self.answered_s = self._clock()
            self._notice = message.weights or self._notice
            if isinstance(message, WorkGrant):
                self._is_unanswered = False
                items: list[WorkItem | HeldOutItem] = [*message.held_out, *message.items]
                self._work.update({item.ticket: item for item in items if item.ticket not in self._undelivered})
                self.held_out_waiting = message.held_out_waiting
            elif isinstance(message, WeightsRoute):
                if self._weights_request is not None and message.attempt == self._weights_request.attempt:
                    self._weights_route = message
            else:
                for ticket in message.tickets:
                    self._undelivered.pop(ticket, None)
            self._changed.notify_all()

    def on_tick(self, now_s: float) -> None:
        """Repeat what was not answered; after long silence look for the learner again."""
        with self._changed:
            asking = self._weights_request
            waiting = bool(self._undelivered) or self._is_unanswered or asking is not None
            if asking is not None and now_s - self._weights_asked_s > REPEAT_S:
                self._weights_asked_s = now_s
                self._post(encode(asking))
            if self._undelivered and now_s - self._sent_s > REPEAT_S:
                self._send(list(self._undelivered.values()))
            if now_s - self._asked_s > REPEAT_S:
                self._ask()
            silent = waiting and now_s - self._heard_s > SILENCE_S
            if silent:
                self._heard_s = now_s
        if silent:
            self._reconnect()

    def _ask(self) -> None:
        self._asked_s, self._is_unanswered = self._clock(), True
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
        self._post(encode(request))

    def _fresh(self) -> list[WorkItem | HeldOutItem]:
        return [item for ticket, item in self._work.items() if ticket not in self._taken]

    def _within(self, max_groups: int) -> list[WorkItem | HeldOutItem]:
        """What is fresh and has room: all held-out prompts, and groups in the places that these leave."""
        held_out = [item for item in self._fresh() if isinstance(item, HeldOutItem)]
        groups = [item for item in self._fresh() if isinstance(item, WorkItem)]
        lost = math.ceil(len(held_out) / groups[0].group_size) if groups else 0
        return [*held_out, *groups[: max(0, max_groups - lost)]]

    def _forget(self, ticket: str) -> None:
        self._work.pop(ticket, None)
        self._taken.discard(ticket)

    def _send(self, groups: list[Delivery]) -> None:
        self._sent_s = self._clock()
        part: list[Delivery] = []
        part_bytes = 0
        for group in groups:
            num_bytes = len(encode(group))
            if part and (part_bytes + num_bytes > MAX_BATCH_BYTES or len(part) == MAX_BATCH):
                self._post_groups(part)
                part, part_bytes = [], 0
            part.append(group)
            part_bytes += num_bytes
        if part:
            self._post_groups(part)

    def _post_groups(self, groups: list[Delivery]) -> None:
        finished = [group for group in groups if isinstance(group, ScoredGroup)]
        stale = [group for group in groups if isinstance(group, StaleGroup)]
        held_out = [group for group in groups if isinstance(group, HeldOutAnswer)]
        if finished or stale:
            self._post(encode(Groups(worker=self._worker, groups=finished, stale=stale)))
        if held_out:
            self._post(encode(HeldOutAnswers(worker=self._worker, answers=held_out)))
