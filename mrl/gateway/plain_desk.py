"""Requests outside of episodes on their way: they wait for a worker with room, and go to another one if it is lost."""

import asyncio
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mrl.gateway.chat_wire import ChatMistake
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
ANSWER_S, NO_WORKER_S = 600.0, 60.0
"""Until a request is given up; and where no worker of the policy has been there for so long."""
VERSION_MARK = "@"


@dataclass(frozen=True)
class Checkpoints:
    """What is kept of policies of a run, and how to ask it. It is not served here: that takes an engine of its own."""

    run_folder: Path
    steps: Callable[[str], Collection[int]]
    """Policy -> steps of which there is a checkpoint now."""

    def told(self, policy: str, wanted: str) -> str:
        """A line that names them, and the commands for the step that is `wanted`, or the nearest there is."""
        steps = sorted(self.steps(policy))
        if not steps:
            return f"there is no checkpoint of {policy} yet"
        kept = ", ".join(map(str, steps))
        is_step = wanted.isdecimal() and len(wanted) < 19  # Python refuses to read thousands of digits
        near = min(steps, key=lambda step: abs(step - int(wanted))) if is_step else steps[-1]
        run = shlex.quote(str(self.run_folder))
        return (
            f"checkpoints of {policy} are there of step {kept}: `mrl export {run} --policy {policy} --step {near}` "
            f"makes a folder of one for a server of your own, `mrl eval {run}@{near} --policy {policy}` evaluates it"
        )


@dataclass(eq=False)
class _Pending:
    policy: str
    step: int | None
    """Weights that alone are to answer; None: whichever are served."""
    request: PlainRequest
    answer: "asyncio.Future[PlainAnswer]"
    asked_s: float
    on_piece: Callable[[PlainPiece], None]
    num_tries: int = 0
    is_begun: bool = False
    """Whether a piece of its answer has been passed on: nobody can take that back, so no other worker begins anew."""


@dataclass(eq=False)
class ServingWorker:
    """One worker at the other end of a line; `send` never waits."""

    send: Callable[[FromGateway], None]
    room: WorkerRoom | None = None
    holding: dict[str, _Pending] = field(default_factory=dict)

    def may_take(self, pending: _Pending) -> bool:
        """Whether it has room for a request, and is the right one."""
        room = self.room
        if room is None or room.policy != pending.policy or len(self.holding) >= room.room:
            return False
        return pending.step in (None, room.version)


class PlainDesk:
    """All of them, in one event loop."""

    def __init__(
        self, policies: Sequence[str], checkpoints: Checkpoints, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._checkpoints, self._clock = checkpoints, clock
        self._workers: list[ServingWorker] = []
        self._waiting: deque[_Pending] = deque()
        self._seen_s = dict.fromkeys(policies, clock())
        """When a worker of a policy was there last."""
        self.counts: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Answers that are waited for."""
        return len(self._waiting) + sum(len(worker.holding) for worker in self._workers)

    def model(self, name: str) -> tuple[str, int | None]:
        """Policy and step of a model's name. Raises ChatMistake where that is not served now."""
        policy, mark, step = name.partition(VERSION_MARK)
        if policy in self._seen_s and (not mark or step in map(str, self._served(policy))):
            return policy, int(step) if mark else None
        words = f"model {name!r:.80}: there are {self._told()}; other versions are not served"
        if policy in self._seen_s:
            words = f"{words}; {self._checkpoints.told(policy, step)}"
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
        pending = _Pending(policy, step, request, answer, self._clock(), on_piece)
        self._waiting.append(pending)
        self._hand_out()
        try:
            found = await answer
        finally:
            self._forget(pending)
        if step not in (None, found.version):
            raise self._gone(pending, f"{policy}{VERSION_MARK}{found.version} while it answered")
        return found

    def join(self, send: Callable[[FromGateway], None]) -> ServingWorker:
        """A worker is there; what it says goes to `hear`."""
        worker = ServingWorker(send)
        self._workers.append(worker)
        return worker

    def hear(self, worker: ServingWorker, message: PlainReply) -> None:
        """What a worker says."""
        if isinstance(message, WorkerRoom):
            worker.room = message
            self._seen_s[message.policy] = self._clock()
        elif isinstance(message, PlainPiece):
            if (pending := worker.holding.get(message.request_id)) is not None:
                self._grew(pending, message)
            return
        elif (pending := worker.holding.pop(message.request_id, None)) is not None:
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
        """Give up what nobody has answered for too long."""
        now_s = self._clock()
        for worker in self._workers:
            if worker.room is not None:
                self._seen_s[worker.room.policy] = now_s
        for pending in [*self._waiting, *(one for worker in self._workers for one in worker.holding.values())]:
            if now_s - max(pending.asked_s, self._seen_s[pending.policy]) > NO_WORKER_S:
                self._fail(pending, f"no worker of {pending.policy} is there", "no_worker")
            elif now_s - pending.asked_s > ANSWER_S:
                self._fail(pending, f"no answer within {ANSWER_S:g} s", "timeout")

    def _served(self, policy: str) -> list[int]:
        """Steps of the weights that workers of a policy have now."""
        rooms = [worker.room for worker in self._workers if worker.room and worker.room.policy == policy]
        return sorted({room.version for room in rooms if room.version is not None})

    def _told(self) -> str:
        return ", ".join(f"{policy} (now {self._named(policy) or 'starting'})" for policy in self._seen_s)

    def _named(self, policy: str) -> str:
        return " and ".join(f"{policy}{VERSION_MARK}{step}" for step in self._served(policy))

    def _hand_out(self) -> None:
        """The oldest first, each to the worker with the most room."""
        waiting, self._waiting = self._waiting, deque()
        for pending in waiting:
            able = [worker for worker in self._workers if worker.may_take(pending)]
            if not able:
                if not self._is_passed(pending):
                    self._waiting.append(pending)
                continue
            worker = max(able, key=lambda one: one.room.room - len(one.holding) if one.room else 0)
            pending.num_tries += 1
            # Of another name than at the try before, which an engine may not have forgotten.
            name = f"{pending.request.request_id}-{pending.num_tries}"
            worker.holding[name] = pending
            worker.send(msgspec.structs.replace(pending.request, request_id=name))

    def _is_passed(self, pending: _Pending) -> bool:
        """Fail a request for weights that no worker of its policy serves any more, while some serve others."""
        served = self._served(pending.policy)
        if pending.step is None or not served or pending.step in served:
            return False
        self._refuse(pending, self._gone(pending, f"{self._named(pending.policy)} while it waited"))
        return True

    def _gone(self, pending: _Pending, newer: str) -> ChatMistake:
        kept = self._checkpoints.told(pending.policy, str(pending.step))
        return ChatMistake(f"{pending.policy} went on to {newer}; {kept}", code="version_gone", status=409)

    def _grew(self, pending: _Pending, piece: PlainPiece) -> None:
        if pending.answer.done():
            return
        if pending.step not in (None, piece.version):
            newer = f"{pending.policy}{VERSION_MARK}{piece.version} while it answered"
            self._refuse(pending, self._gone(pending, newer))
            return
        pending.is_begun = True
        pending.on_piece(piece)

    def _answered(self, pending: _Pending, message: PlainAnswer | PlainRefusal) -> None:
        if pending.answer.done():
            return
        if isinstance(message, PlainAnswer):
            self.counts["answers"] += 1
            self.counts["tokens"] += len(message.sampled)
            self.counts["scored_tokens"] += max(0, len(message.given) - 1)
            pending.answer.set_result(message)
        elif message.code == LOST and pending.is_begun:
            self._fail(pending, f"its worker was lost in the middle of an answer: {message.words}", "lost")
        elif message.code == LOST and pending.num_tries < MAX_TRIES:
            self.counts["tried_again"] += 1
            self._waiting.appendleft(pending)
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
        if pending in self._waiting:
            self._waiting.remove(pending)
        for worker in self._workers:
            for name in [name for name, one in worker.holding.items() if one is pending]:
                del worker.holding[name]
                worker.send(WithdrawnRequest(name))
