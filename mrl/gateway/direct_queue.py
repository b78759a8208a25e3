"""Queue of requests outside of episodes: each waits for a worker with room; if that is lost, it goes to another."""

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mrl.gateway.chat_wire import ChatRefusal
from mrl.gateway.checkpoint_servers import CheckpointServers, is_step
from mrl.records.direct_requests import (
    LOST,
    DirectAnswer,
    DirectChunk,
    DirectRefusal,
    DirectReply,
    DirectRequest,
    FromGateway,
    WithdrawnRequest,
    WorkerRoom,
)

MAX_PENDING = 4096
"""Requests without an answer yet, at most; further requests are told to come later."""
MAX_TRIES = 3
"""Workers that a request is given to, at most, when each is lost."""
ROOM_S, NO_WORKER_S = 600.0, 60.0
"""Seconds until a request is given up: while no worker has room for it, and while its policy has no worker.

A request that a worker holds has no limit while the worker is connected: its answer may be long, and its engine slow.
"""
VERSION_MARK = "@"


@dataclass(eq=False)
class _Pending:
    """A request without an answer yet, which waits or is held by a worker."""

    policy: str
    step: int | None
    """Step of the only weights that may answer; None: any weights that rollout workers serve."""
    request: DirectRequest
    answer: "asyncio.Future[DirectAnswer]"
    on_piece: Callable[[DirectChunk], None]
    waits_since_s: float = 0.0
    """Clock time since which the request has waited for a worker with room."""
    num_tries: int = 0
    is_begun: bool = False
    """Whether a piece of the answer was passed on. The client has it, so no other worker may begin anew."""


@dataclass(eq=False)
class ServingWorker:
    """A connected worker, and the requests that it holds, by the name under which it got them; `send` never waits."""

    send: Callable[[FromGateway], None]
    room: WorkerRoom | None = None
    holding: dict[str, _Pending] = field(default_factory=dict)

    def may_take(self, policy: str, step: int | None) -> bool:
        """Whether the worker has the weights of this policy and step, and room for a request."""
        room = self.room
        if room is None or room.policy != policy or len(self.holding) >= room.room:
            return False
        return step == room.version if step is not None else not room.is_kept

    def has_gone_on(self, version: int) -> None:
        """Note that the worker has the weights of step `version`, or newer; its own WorkerRoom may come later."""
        if self.room is not None and version > (self.room.version or 0):
            self.room = msgspec.structs.replace(self.room, version=version)


class DirectRequestQueue:
    """Queue of requests outside of episodes, which assigns each to a worker with room. Lives in one event loop."""

    def __init__(
        self, policies: Sequence[str], kept: CheckpointServers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kept, self._clock = kept, clock
        self._workers: list[ServingWorker] = []
        self._waiting: defaultdict[tuple[str, int | None], OrderedDict[_Pending, None]] = defaultdict(OrderedDict)
        """Requests that no worker has yet, by (policy, step), the oldest first."""
        self._seen_s = dict.fromkeys(policies, clock())
        """Policy -> clock time at which a rollout worker of it was last connected."""
        self.counts: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Number of requests without an answer yet."""
        return sum(map(len, self._waiting.values())) + sum(len(worker.holding) for worker in self._workers)

    def model(self, name: str) -> tuple[str, int | None]:
        """Return policy and step of a model's name, `qwen` or `qwen@120`. Raises ChatRefusal where it is not served."""
        policy, mark, step = name.partition(VERSION_MARK)
        is_known = policy in self._seen_s
        if is_known and not mark:
            return policy, None
        if is_known and is_step(step) and int(step) in (*self._served(policy), *self.kept.steps(policy)):
            return policy, int(step)
        words = f"model {name!r:.80} is not served; available: {self._told()}"
        if is_known:
            words = f"{words}; {self.kept.told(policy, step)}"
        raise ChatRefusal(words, code="model_not_found", status=404)

    async def ask(
        self,
        policy: str,
        step: int | None,
        request: DirectRequest,
        on_piece: Callable[[DirectChunk], None] = lambda piece: None,
    ) -> DirectAnswer:
        """Return the answer to a request; pieces of a streamed answer go to `on_piece` first.

        Cancelling the call withdraws the request. Raises ChatRefusal.
        """
        if self.num_waiting >= MAX_PENDING:
            raise ChatRefusal("too many requests are waiting; try again later", code="too_many", status=429)
        answer: asyncio.Future[DirectAnswer] = asyncio.get_running_loop().create_future()
        pending = _Pending(policy, step, request, answer, on_piece)
        try:
            self._wait(pending)
            self._hand_out()
            return await answer
        finally:
            self._forget(pending)

    def join(self, send: Callable[[FromGateway], None]) -> ServingWorker:
        """Add a worker that has connected; its messages go to `hear`."""
        worker = ServingWorker(send)
        self._workers.append(worker)
        return worker

    def hear(self, worker: ServingWorker, message: DirectReply) -> None:
        """Handle one message of a worker."""
        if isinstance(message, WorkerRoom):
            worker.room = message
            if not message.is_kept:
                self._seen_s[message.policy] = self._clock()
            elif message.version is not None:
                self.kept.is_loaded(message.policy, message.version)
        elif isinstance(message, DirectChunk):
            if (pending := worker.holding.get(message.request_id)) is None or not self._grew(pending, message):
                return
            worker.has_gone_on(message.version)
        elif (pending := worker.holding.pop(message.request_id, None)) is not None:
            if isinstance(message, DirectAnswer):
                worker.has_gone_on(message.version)
            self._answered(pending, message)
        self._hand_out()

    def leave(self, worker: ServingWorker) -> None:
        """Remove a worker whose connection ended; its requests go to other workers."""
        self._workers.remove(worker)
        for pending in worker.holding.values():
            self._answered(pending, DirectRefusal(pending.request.request_id, LOST, "the worker disconnected"))
        worker.holding.clear()
        self._hand_out()

    def tend(self) -> None:
        """Refuse requests that have waited too long, or whose version's process failed; assign the others."""
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
                self._fail(pending, f"no worker of {policy} is connected", "no_worker")
            elif pending not in held and waited_s > ROOM_S:
                self._fail(pending, f"no worker of {policy} had room within {ROOM_S:g} s", "timeout")
        self._hand_out()

    def _served(self, policy: str) -> list[int]:
        """Steps of the weights that a policy's rollout workers have now, without kept versions."""
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
        """Give waiting requests to workers: the oldest of a (policy, step) first, to the worker with the most room."""
        for (policy, step), queue in list(self._waiting.items()):
            while queue and (able := [worker for worker in self._workers if worker.may_take(policy, step)]):
                pending, _ = queue.popitem(last=False)
                worker = max(able, key=lambda one: one.room.room - len(one.holding) if one.room else 0)
                pending.num_tries += 1
                # A new name for each try: an engine may still know the name of the try before.
                name = f"{pending.request.request_id}-{pending.num_tries}"
                worker.holding[name] = pending
                worker.send(msgspec.structs.replace(pending.request, request_id=name))
            if queue and step is not None and (mistake := self._never(policy, step)):
                for pending in queue:
                    self._refuse(pending, mistake)
                queue.clear()
            if not queue:
                del self._waiting[policy, step]

    def _never(self, policy: str, step: int) -> ChatRefusal | None:
        """Return why no worker will ever serve the weights of `step`: no checkpoint, or no room for its process.

        None where a worker has the weights or may get them; where there is a checkpoint, its process is started.
        """
        served = self._served(policy)
        if step in served or self.kept.use(policy, step) or self.kept.is_changing:
            return None
        if step in self.kept.steps(policy):
            try:
                self.kept.want(policy, step)
            except ChatRefusal as mistake:
                return mistake
            return None
        return self._gone(policy, step, f"{self._named(policy)} while the request waited") if served else None

    def _gone(self, policy: str, step: int, newer: str) -> ChatRefusal:
        words = f"{policy} was updated to {newer}; {self.kept.told(policy, str(step))}"
        return ChatRefusal(words, code="version_gone", status=409)

    def _overtaken(self, pending: _Pending, version: int) -> None:
        """Handle a request that newer weights have answered: it waits for its checkpoint's process, or is refused.

        It is refused without a checkpoint, and where a piece of its answer was passed on.
        """
        policy, step = pending.policy, pending.step
        assert step is not None, "any weights will do"
        if step in self.kept.steps(policy) and not pending.is_begun:
            self._wait(pending, is_first=True)
        else:
            self._refuse(pending, self._gone(policy, step, f"{policy}{VERSION_MARK}{version} during the answer"))

    def _grew(self, pending: _Pending, piece: DirectChunk) -> bool:
        """Pass on a piece of an answer, if the right weights sampled it. Return whether the request waits again."""
        if pending.answer.done():
            return False
        if pending.step in (None, piece.version):
            pending.is_begun = True
            pending.on_piece(piece)
            return False
        self._forget(pending)
        self._overtaken(pending, piece.version)
        return not pending.answer.done()

    def _answered(self, pending: _Pending, message: DirectAnswer | DirectRefusal) -> None:
        if pending.answer.done():
            return
        if isinstance(message, DirectAnswer) and pending.step not in (None, message.version):
            self._overtaken(pending, message.version)
        elif isinstance(message, DirectAnswer):
            self.counts["answers"] += 1
            self.counts["tokens"] += len(message.sampled)
            self.counts["scored_tokens"] += max(0, len(message.given) - 1)
            pending.answer.set_result(message)
        elif message.code == LOST and pending.is_begun:
            self._fail(pending, f"the worker was lost in the middle of the answer: {message.words}", "lost")
        elif message.code == LOST and pending.num_tries < MAX_TRIES:
            self.counts["tried_again"] += 1
            self._wait(pending, is_first=True)
        elif message.code == LOST:
            self._fail(pending, f"the worker was lost {MAX_TRIES} times: {message.words}", "lost")
        else:
            self._refuse(pending, ChatRefusal(message.words, code=message.code))

    def _fail(self, pending: _Pending, words: str, code: str) -> None:
        self._refuse(pending, ChatRefusal(words, code=code, status=503))

    def _refuse(self, pending: _Pending, mistake: ChatRefusal) -> None:
        if not pending.answer.done():
            pending.answer.set_exception(mistake)

    def _forget(self, pending: _Pending) -> None:
        if (queue := self._waiting.get((pending.policy, pending.step))) is not None:
            queue.pop(pending, None)
        for worker in self._workers:
            for name in [name for name, one in worker.holding.items() if one is pending]:
                del worker.holding[name]
                worker.send(WithdrawnRequest(name))
