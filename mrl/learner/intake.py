"""The learner's link to its rollout workers: a thread that answers them from the ledger while the learner trains."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from mrl.errors import RecordError, RoleFailed
from mrl.learner.held_out_ledger import Evaluated, HeldOutLedger
from mrl.learner.ledger import IsSettled, WorkLedger, always
from mrl.learner.verifier_limit import VerifierFailures
from mrl.learner.worker_activity import WaitBounds, WorkerActivity
from mrl.records.codec import decode, encode
from mrl.records.rollouts import (
    MAX_GROUP_BYTES,
    Continuation,
    Goodbye,
    Groups,
    GroupsAck,
    HeldOutAnswers,
    LearnerMessage,
    ScoredGroup,
    WeightsNotice,
    WeightsRequest,
    WorkGrant,
    WorkRequest,
    worker_message_decoder,
)
from mrl.records.version import Version
from mrl.tasks.pool import Prompt
from mrl.transport.server import ServerSocket

if TYPE_CHECKING:
    from mrl.weights.broadcast import BroadcastPublisher

POLL_S = 0.05
WORKER_SILENCE_S = 60.0
GOODBYE_S = 3.0
"""Seconds to wait until all workers have heard the goodbye: they say something every second."""


@dataclass
class Waits:
    """Seconds that the learner waited since its last batch."""

    since_s: float
    wait_s: float = 0.0
    short_s: float = 0.0
    """Part of the wait in which workers might not sample more."""


class Intake:
    """Grants work to workers and takes in their groups. Its own thread calls `turn`; other threads call the rest."""

    def __init__(
        self,
        server: ServerSocket,
        ledger: WorkLedger,
        *,
        held_out: HeldOutLedger | None = None,
        evaluates_alone: bool = False,
        courier: "BroadcastPublisher | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`courier` answers requests for weights; without it every version lies in files, and no worker asks.

        Without `held_out` nothing is evaluated. With `evaluates_alone` no groups are granted while an evaluation is
        under way.
        """
        self._courier = courier
        self._held_out, self._evaluates_alone = held_out, evaluates_alone
        self._server, self._ledger, self._clock = server, ledger, clock
        self._changed = threading.Condition()
        self._waits = Waits(clock())
        self._news = WorkerActivity.since(clock())
        self._arrivals: list[ScoredGroup] = []
        self._unjudged = VerifierFailures()
        self._notice: WeightsNotice | None = None
        self._stopping = False
        self._unaware: set[str] | None = None
        """Workers that have not yet acknowledged that all steps are done; None before these are done."""
        self.malformed = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="intake", daemon=True)

    def open(self) -> None:
        """Answer workers from now on; until the first weights are announced, only to show that the learner is there."""
        if self._thread.ident is None and not self._stopping:
            self._thread.start()

    def announce(self, notice: WeightsNotice) -> None:
        """Announce these weights to workers from now on; open the link where that has not been done."""
        with self._changed:
            self._news.announced(self._clock())
            self._notice = notice
            self._ledger.announced(notice.version)
        self.open()

    def publishing(self, progress: int) -> None:
        """Note how far the publishing of new weights is: `progress` is another number whenever it has got on."""
        with self._changed:
            self._news.publishing(progress, self._clock())

    def note_progress(self) -> None:
        """Note progress of the learner itself, for example in its training."""
        with self._changed:
            self._news.num_moves += 1

    @property
    def num_moves(self) -> int:
        """How often workers, the publishing of weights, or the learner itself have got on since its start."""
        with self._changed:
            return self._news.num_moves

    def arrivals(self) -> list[ScoredGroup]:
        """Return groups that came in since the last call, whether or not they will be fresh enough to train on."""
        with self._changed:
            arrived, self._arrivals = self._arrivals, []
        return arrived

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleep until a group comes in, at most `timeout_s`. Raises RoleFailed when the link's thread has ended."""
        with self._changed:
            self._check()
            if not self._arrivals:
                began_s, is_short = self._clock(), self._ledger.is_short
                self._changed.wait(timeout_s)
                self._count_wait(self._clock() - began_s, is_short)

    @property
    def has_served(self) -> bool:
        """Whether any worker has proved weights since the learner began."""
        with self._changed:
            return self._news.has_served

    def given_up(self, bounds: WaitBounds, began_s: float) -> str:
        """Return why a wait for groups since `began_s` (of this clock) is over; empty while any worker gets on."""
        with self._changed:
            return bounds.given_up(self._news, began_s, self._clock())

    def unsettled(self, step: int, is_settled: IsSettled = always, hold_versions: int = 0) -> int | None:
        """Return how many groups of the next batch are not settled; None while there are too few groups."""
        with self._changed:
            return self._ledger.unsettled(step, is_settled, hold_versions)

    def next_batch(self, step: int, is_settled: IsSettled = always, hold_versions: int = 0) -> list[ScoredGroup] | None:
        """Return the groups of `step`, settled ones first, or None while there are too few; never waits."""
        with self._changed:
            batch = self._ledger.take_batch(step, is_settled, hold_versions)
            if batch is not None:
                now_s, waits = self._clock(), self._waits
                self._ledger.adjust(short_wait_s=waits.short_s, wait_s=waits.wait_s, period_s=now_s - waits.since_s)
                self._waits = Waits(now_s)
            return batch

    # Evaluations.

    def evaluate(self, version: Version, prompts: Sequence[Prompt]) -> None:
        """Have these held-out prompts answered by workers that serve `version`, or a newer one."""
        with self._changed:
            self._books.ask(version, prompts, self._clock())

    def evaluated(self, timeout_s: float = 0.0) -> list[Evaluated]:
        """Return the evaluations that ended since the last call; wait at most `timeout_s` for a held-out answer.

        Raises RoleFailed when the link's thread has ended.
        """
        with self._changed:
            self._check()
            if timeout_s and self._books.is_open:
                self._changed.wait(timeout_s)
            return self._books.take_over()

    @property
    def is_evaluating(self) -> bool:
        """Whether the newest evaluation is under way."""
        with self._changed:
            return self._books.is_open

    def stop_evaluating(self) -> None:
        """End all evaluations with the held-out answers that came."""
        with self._changed:
            self._books.give_up(self._clock())

    @property
    def _books(self) -> HeldOutLedger:
        assert self._held_out is not None, "nobody evaluates without it"
        return self._held_out

    @property
    def window_groups(self) -> float | None:
        """Groups that may be running and ready at an adaptive pace; None at any other pace."""
        with self._changed:
            return None if self._ledger.window is None else self._ledger.window.groups

    def offer(self, found: Sequence[Continuation]) -> None:
        """Have groups sampled for these continuations."""
        with self._changed:
            self._ledger.offer(found)

    @property
    def curriculum_values(self) -> dict[str, float]:
        """Metrics of the curriculum; empty where no prompt is skipped."""
        with self._changed:
            return {} if self._ledger.curriculum is None else self._ledger.curriculum.values()

    def state(self) -> dict[str, Any]:
        """Return the ledger's part of a checkpoint."""
        with self._changed:
            return self._ledger.state()

    def take_counts(self) -> dict[str, int]:
        """Return what the ledger counted since the last call."""
        with self._changed:
            counts = dict(self._ledger.counts)
            self._ledger.counts.clear()
        return counts

    def take_failures(self) -> VerifierFailures:
        """Return counts of the answers on which verifiers failed since the last call."""
        with self._changed:
            taken, self._unjudged = self._unjudged, VerifierFailures()
        return taken

    def say_goodbye(self) -> None:
        """Tell every worker, within a bound, that all steps are done, so that none takes the silence for a loss."""
        with self._changed:
            self._unaware = set(self._ledger.last_seen_s)
            self._changed.wait_for(lambda: not self._unaware, GOODBYE_S)

    def close(self) -> None:
        """Stop answering."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._server.close()

    def turn(self, timeout_s: float) -> None:
        """Answer messages, waiting for them at most `timeout_s`, and take back work of silent workers.

        Only the link's own thread calls it.
        """
        for client, body, _grant in self._server.receive(timeout_s):
            try:
                message = decode(body, worker_message_decoder, max_bytes=MAX_GROUP_BYTES)
            except RecordError:
                self.malformed += 1
                continue
            if isinstance(message, Goodbye):
                self._has_heard(message.role)
            elif self._unaware is not None:
                self._server.send(client, encode(Goodbye(role="learner")))
            elif not isinstance(message, WeightsRequest):
                self._server.send(client, encode(self._answer(message)))
            elif self._courier is not None:
                self._courier.ask(client, message)
        with self._changed:
            silent = self._ledger.expire(self._clock(), WORKER_SILENCE_S)
            if self._held_out is not None:
                self._held_out.expire(silent, self._clock())
        self._route_weights()

    def _has_heard(self, worker: str) -> None:
        with self._changed:
            if self._unaware is not None:
                self._unaware.discard(worker)
                self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self.turn(POLL_S)
        except Exception as error:  # noqa: BLE001 - the thread's outer edge: the learner's thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _route_weights(self) -> None:
        if self._courier is not None and self._notice is not None:
            for client, route in self._courier.answers(self._notice, num_workers=len(self._ledger.last_seen_s)):
                self._server.send(client, encode(route))

    def _answer(self, message: WorkRequest | Groups | HeldOutAnswers) -> LearnerMessage:
        now_s = self._clock()
        with self._changed:
            notice = self._notice
            if notice is None:
                return self._answer_early(message, now_s)
            if isinstance(message, WorkRequest):
                self._news.asked(message, now_s, serves=self._ledger.may_sample(message.serving))
                # A worker whose engine has yet to start is no replica, and holds nothing that it could lose.
                is_starting = message.serving is None and not (message.max_groups or message.holding)
                return WorkGrant(items=[], weights=notice) if is_starting else self._grant(message, notice, now_s)
            self._news.delivered(now_s)
            if isinstance(message, HeldOutAnswers):
                if self._held_out is not None:  # else they are of an earlier life, which evaluated
                    self._held_out.accept(message.answers, now_s)
                self._changed.notify_all()
                return GroupsAck(tickets=[answer.ticket for answer in message.answers], weights=notice)
            self._note(self._ledger.accept(message.groups, message.worker, now_s))
            self._ledger.write_off(message.stale, message.worker, now_s)
            tickets = [group.ticket for group in message.groups] + [group.ticket for group in message.stale]
            return GroupsAck(tickets=tickets, weights=notice)

    def _answer_early(self, message: WorkRequest | Groups | HeldOutAnswers, now_s: float) -> LearnerMessage:
        """Answer before any weights are announced: nothing is granted or taken over, and the worker sends it again."""
        if not isinstance(message, WorkRequest):
            return GroupsAck(tickets=[])
        self._news.asked(message, now_s, serves=False)
        return WorkGrant(items=[])

    def _grant(self, request: WorkRequest, notice: WeightsNotice, now_s: float) -> WorkGrant:
        """Grant held-out prompts first, then groups in the places left, or more held-out prompts without groups."""
        held_out = self._held_out
        if held_out is None:
            return WorkGrant(items=self._ledger.grant(request, now_s), weights=notice)
        held_out.lose(request.worker, request.holding, now_s)
        beside = held_out.grant(request)
        is_alone = self._evaluates_alone and held_out.is_open
        max_groups = request.max_groups - math.ceil(len(beside) / self._ledger.pace.group_size)
        less = msgspec.structs.replace(request, max_groups=0 if is_alone else max(0, max_groups))
        items = self._ledger.grant(less, now_s)
        if is_alone or not (items or self._ledger.capacity(request.serving)):
            beside += held_out.grant_alone(request, len(beside))
        return WorkGrant(items=items, weights=notice, held_out=beside, held_out_waiting=held_out.waiting)

    def _check(self) -> None:
        if self._failure is not None:
            raise RoleFailed(f"the link to the workers failed: {self._failure!r}") from self._failure

    def _count_wait(self, seconds: float, is_short: bool) -> None:
        self._waits.wait_s += seconds
        self._waits.short_s += seconds if is_short else 0.0

    def _note(self, new: Sequence[ScoredGroup]) -> None:
        if new:
            self._unjudged.note(new)
            self._arrivals.extend(new)
            self._changed.notify_all()
