"""Requests outside of episodes on their way: they wait for a worker with room, and go to another one if it is lost."""

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mrl.gateway.chat_wire import ChatMistake
from mrl.gateway.kept_versions import KeptVersions, is_step
from mrl.records.plain_requests import (
    LOST,
    FromGateway,
    PlainAnswer,
    PlainPiece,
    PlainRefusal,
    PlainReply,
    PlainRequest,
    WithdrawnRequest,
    WorkerRoom,
)

MAX_PENDING = 4096
"""Answers that are waited for; further requests are told to come later."""
MAX_TRIES = 3
ROOM_S, NO_WORKER_S = 600.0, 60.0
"""Until a request that no worker has room for is given up, and one that no worker of its policy is there for.

One that a worker has is waited for as long as the worker's line holds: an answer may be long, and its engine slow.
"""
VERSION_MARK = "@"


@dataclass(eq=False)
class _Pending:
    policy: str
    step: int | None
    """Weights that alone are to answer; None: whichever are served."""
    request: PlainRequest
    answer: "asyncio.Future[PlainAnswer]"
    on_piece: Callable[[PlainPiece], None]
    waits_since_s: float = 0.0
    """For a worker with room."""
    num_tries: int = 0
    is_begun: bool = False
    """Whether a piece of its answer has been passed on: nobody can take that back, so no other worker begins anew."""


@dataclass(eq=False)
class ServingWorker:
    """One worker at the other end of a line; `send` never waits."""

    send: Callable[[FromGateway], None]
    room: WorkerRoom | None = None
    holding: dict[str, _Pending] = field(default_factory=dict)

    def may_take(self, policy: str, step: int | None) -> bool:
        """Whether it has room for a request of these weights, and has them."""
        room = self.room
        if room is None or room.policy != policy or len(self.holding) >= room.room:
            return False
        return step == room.version if step is not None else not room.is_kept

    def has_gone_on(self, version: int) -> None:
        """It has these weights now, or newer ones; what it tells of its room may come later."""
        if self.room is not None and version > (self.room.version or 0):
            self.room = msgspec.structs.replace(self.room, version=version)


class PlainDesk:
    """All of them, in one event loop."""

    def __init__(
        self, policies: Sequence[str], kept: KeptVersions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kept, self._clock = kept, clock
        self._workers: list[ServingWorker] = []
        self._waiting: defaultdict[tuple[str, int | None], OrderedDict[_Pending, None]] = defaultdict(OrderedDict)
        """By policy and step, the oldest first."""
        self._seen_s = dict.fromkeys(policies, clock())
        """When a worker of a policy was there last."""
        self.counts: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Answers that are waited for."""
        return sum(map(len, self._waiting.values())) + sum(len(worker.holding) for worker in self._workers)

    def model(self, name: str) -> tuple[str, int | None]:
        """Policy and step of a model's name. Raises ChatMistake where that is not served now."""
        policy, mark, step = name.partition(VERSION_MARK)
        is_known = policy in self._seen_s
        if is_known and not mark:
            return policy, None
        if is_known and is_step(step) and int(step) in (*self._served(policy), *self.kept.steps(policy)):
            return policy, int(step)
        words = f"model {name!r:.80}: there are {self._told()}"
        if is_known:
            words = f"{words}; {self.kept.told(policy, step)}"
        raise ChatMistake(words, code="model_not_found", status=404)

    async def ask(
        self,
        policy: str,
        step: int | None,
        request: PlainRequest,
        on_piece: Callable[[PlainPiece], None] = lambda piece: None,
    ) -> PlainAnswer:
        """The answer; of one that streams, each piece is given to `on_piece` first.

        Whoever does not wait for it any more withdraws the request. Raises ChatMistake.
        """
        if self.num_waiting >= MAX_PENDING:
            raise ChatMistake("too many requests wait for answers; come later", code="too_many", status=429)
        answer: asyncio.Future[PlainAnswer] = asyncio.get_running_loop().create_future()
        pending = _Pending(policy, step, request, answer, on_piece)
        try:
            self._wait(pending)
            self._hand_out()
            return await answer
        finally:
            self._forget(pending)

    def join(self, send: Callable[[FromGateway], None]) -> ServingWorker:
        """A worker is there; what it says goes to `hear`."""
        worker = ServingWorker(send)
        self._workers.append(worker)
        return worker

    def hear(self, worker: ServingWorker, message: PlainReply) -> None:
        """What a worker says."""
        if isinstance(message, WorkerRoom):
            worker.room = message
            if not message.is_kept:
                self._seen_s[message.policy] = self._clock()
            elif message.version is not None:
                self.kept.is_loaded(message.policy, message.version)
        elif isinstance(message, PlainPiece):
            if (pending := worker.holding.get(message.request_id)) is None or not self._grew(pending, message):
                return
            worker.has_gone_on(message.version)
        elif (pending := worker.holding.pop(message.request_id, None)) is not None:
            if isinstance(message, PlainAnswer):
                worker.has_gone_on(message.version)
            self._answered(pending, message)
        self._hand_out()

    def leave(self, worker: ServingWorker) -> None:
        """It is gone; what it had goes to others."""
        self._workers.remove(worker)
        for pending in worker.holding.values():
            self._answered(pending, PlainRefusal(pending.request.request_id, LOST, "its worker is gone"))
        worker.holding.clear()
        self._hand_out()

    def tend(self) -> None:
        """Give up what nobody has answered for too long, or will."""
        now_s = self._clock()
        failed = {(policy, step): words for policy, step, words in self.kept.tend()}
        for worker in self._workers:
            if worker.room is not None and not worker.room.is_kept:
                self._seen_s[worker.room.policy] = now_s
        held = dict.fromkeys(one for worker in self._workers for one in worker.holding.values())
        for pending in [*held, *(one for queue in self._waiting.values() for one in queue)]:
            policy, step = pending.policy, pending.step
            is_kept = step is not None and self.kept.use(policy, step)
            waited_s = now_s - pending.waits_since_s
            if step is not None and (words := failed.get((policy, step))):
                self._fail(pending, words, "lost")
            elif not is_kept and min(waited_s, now_s - self._seen_s[policy]) > NO_WORKER_S:
                self._fail(pending, f"no worker of {policy} is there", "no_worker")
            elif pending not in held and waited_s > ROOM_S:
                self._fail(pending, f"no worker of {policy} had room within {ROOM_S:g} s", "timeout")
        self._hand_out()

    def _served(self, policy: str) -> list[int]:
        """Steps of the weights that rollout workers of a policy have now."""
        rooms = [worker.room for worker in self._workers if worker.room and worker.room.policy == policy]
        return sorted({room.version for room in rooms if room.version is not None and not room.is_kept})

    def _told(self) -> str:
        return ", ".join(f"{policy} (now {self._named(policy) or 'starting'})" for policy in self._seen_s)

    def _named(self, policy: str) -> str:
        return " and ".join(f"{policy}{VERSION_MARK}{step}" for step in self._served(policy))

    def _wait(self, pending: _Pending, *, is_first: bool = False) -> None:
        pending.waits_since_s = self._clock()
        queue = self._waiting[pending.policy, pending.step]
        queue[pending] = None
        if is_first:
            queue.move_to_end(pending, last=False)

    def _hand_out(self) -> None:
        """Of each policy and step the oldest first, each to the worker with the most room."""
        for (policy, step), queue in list(self._waiting.items()):
            while queue and (able := [worker for worker in self._workers if worker.may_take(policy, step)]):
                pending, _ = queue.popitem(last=False)
                worker = max(able, key=lambda one: one.room.room - len(one.holding) if one.room else 0)
                pending.num_tries += 1
                # Of another name than at the try before, which an engine may not have forgotten.
                name = f"{pending.request.request_id}-{pending.num_tries}"
                worker.holding[name] = pending
                worker.send(msgspec.structs.replace(pending.request, request_id=name))
            if queue and step is not None and (mistake := self._never(policy, step)):
                for pending in queue:
                    self._refuse(pending, mistake)
                queue.clear()
            if not queue:
                del self._waiting[policy, step]

    def _never(self, policy: str, step: int) -> ChatMistake | None:
        """Why nobody will serve these weights, where no worker has them: there is no checkpoint, or no room for it.

        Else they are served from that.
        """
        served = self._served(policy)
        if step in served or self.kept.use(policy, step) or self.kept.is_changing:
            return None
        if step in self.kept.steps(policy):
            try:
                self.kept.want(policy, step)
            except ChatMistake as mistake:
                return mistake
            return None
        return self._gone(policy, step, f"{self._named(policy)} while it waited") if served else None

    def _gone(self, policy: str, step: int, newer: str) -> ChatMistake:
        words = f"{policy} went on to {newer}; {self.kept.told(policy, str(step))}"
        return ChatMistake(words, code="version_gone", status=409)

    def _overtaken(self, pending: _Pending, version: int) -> None:
        """Newer weights came while it was answered: anew from the checkpoint, if there is one and nothing was told."""
        policy, step = pending.policy, pending.step
        assert step is not None, "any weights will do"
        if step in self.kept.steps(policy) and not pending.is_begun:
            self._wait(pending, is_first=True)
        else:
            self._refuse(pending, self._gone(policy, step, f"{policy}{VERSION_MARK}{version} while it answered"))

    def _grew(self, pending: _Pending, piece: PlainPiece) -> bool:
        """Whether it is to be handed out anew."""
        if pending.answer.done():
            return False
        if pending.step in (None, piece.version):
            pending.is_begun = True
            pending.on_piece(piece)
            return False
        self._forget(pending)
        self._overtaken(pending, piece.version)
        return not pending.answer.done()

    def _answered(self, pending: _Pending, message: PlainAnswer | PlainRefusal) -> None:
        if pending.answer.done():
            return
        if isinstance(message, PlainAnswer) and pending.step not in (None, message.version):
            self._overtaken(pending, message.version)
        elif isinstance(message, PlainAnswer):
            self.counts["answers"] += 1
            self.counts["tokens"] += len(message.sampled)
            self.counts["scored_tokens"] += max(0, len(message.given) - 1)
            pending.answer.set_result(message)
        elif message.code == LOST and pending.is_begun:
            self._fail(pending, f"its worker was lost in the middle of an answer: {message.words}", "lost")
        elif message.code == LOST and pending.num_tries < MAX_TRIES:
            self.counts["tried_again"] += 1
            self._wait(pending, is_first=True)
        elif message.code == LOST:
            self._fail(pending, f"its worker was lost {MAX_TRIES} times: {message.words}", "lost")
        else:
            self._refuse(pending, ChatMistake(message.words, code=message.code))

    def _fail(self, pending: _Pending, words: str, code: str) -> None:
        self._refuse(pending, ChatMistake(words, code=code, status=503))

    def _refuse(self, pending: _Pending, mistake: ChatMistake) -> None:
        if not pending.answer.done():
            pending.answer.set_exception(mistake)

    def _forget(self, pending: _Pending) -> None:
        if (queue := self._waiting.get((pending.policy, pending.step))) is not None:
            queue.pop(pending, None)
        for worker in self._workers:
            for name in [name for name, one in worker.holding.items() if one is pending]:
                del worker.holding[name]
                worker.send(WithdrawnRequest(name))
