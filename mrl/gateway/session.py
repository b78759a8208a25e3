"""One episode between its seat, where the policy is, and the agent that plays it.

The seat asks for one thing at a time and waits: what the agent says first, what it says to a turn, the reward. What the
agent asks for at the same time takes its turns one after another. All of it happens in one event loop.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from mrl.errors import RecordError
from mrl.gateway.chat_wire import ChatCall, ChatMistake, is_same, said_by
from mrl.records.canonical_json import canonical_json
from mrl.records.episodes import Message
from mrl.records.plain_requests import TurnPiece
from mrl.tasks.environments.contract import (
    DONE,
    ENDS,
    GIVEN_UP,
    RAISED,
    WRONG_TYPE,
    EnvironmentTurn,
    PolicyTurn,
)

log = structlog.get_logger()

MAX_WAITING = 64
"""Requests of a session that wait for turns, and turns that are kept for clients that hung up before they had them."""
IDLE_BESIDE_TURNS = 10
"""So many times as long an agent may be silent that waits for a turn of another policy: two may wait for each other."""
OVER = "episode_over"
"""Code of the answer to whoever asks on when there are no further turns."""


def _unheard(number: int, text: str) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Asked:
    """A request, and the turn that it gets."""

    call: ChatCall
    number: int
    turn: "asyncio.Future[PolicyTurn]"
    is_read: bool = False
    """Whether a client has had it."""


@dataclass(eq=False)
class AgentSession:
    """An episode of one policy. `row` is what the task gives its agents, as JSON values."""

    session_id: str
    policy: str
    task: str
    row: dict[str, Any]
    clock: Callable[[], float] = time.monotonic
    said: list[Message] = field(default_factory=list)
    """The conversation so far, from both sides."""
    num_turns: int = 0
    touched_s: float = 0.0
    """When the agent was last heard, or the policy last answered it."""
    ending: str = ""
    """Why there are no further turns; "" while there may be."""
    is_over: bool = False
    """Whether the seat has its last reply."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of its book: "branches" are counted here."""
    player: str = ""
    """The process that plays it, if the gateway started that."""
    beside: tuple["AgentSession", ...] = ()
    """Those of other policies that the same agent was given with it."""
    start_state: str = field(init=False)
    """The row as one text: equal for the episodes of a group, and for those of peers from the same state."""
    _reply: "asyncio.Future[EnvironmentTurn] | None" = None
    """What the seat waits for."""
    _answer: "asyncio.Future[PolicyTurn] | None" = None
    """What the agent waits for."""
    _parting: EnvironmentTurn | None = None
    """What the seat is told next, where the agent gave up while the policy had its turn."""
    _on_grown: Callable[[int, str], None] = _unheard
    """Hears what a turn says more, while it is sampled."""
    _grown: str = ""
    """What it says so far."""
    _num_waiting: int = 0
    """Requests that wait for the turn of another one."""
    _last: _Asked | None = None
    """The newest request that has, or had, the policy's turn."""
    _unread: deque[_Asked] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    """Earlier ones whose clients hung up before they had their turns."""

    def __post_init__(self) -> None:
        self.touched_s = self.clock()
        self.start_state = canonical_json(self.row)

    # The seat's side.

    def opened(self) -> "asyncio.Future[EnvironmentTurn]":
        """What the agent says first."""
        return self._await_agent()

    def step(self, turn: PolicyTurn) -> "asyncio.Future[EnvironmentTurn]":
        """What the agent says to a turn."""
        reply = self._await_agent()
        self._give(turn)
        return reply

    def grew(self, piece: TurnPiece) -> None:
        """A turn goes on. What comes too late, or behind a gap, is left to the whole turn."""
        if self._answer is not None and (piece.num_turns, piece.start) == (self.num_turns, len(self._grown)):
            self._grown += piece.text
            self._on_grown(self.num_turns + 1, piece.text)

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "asyncio.Future[EnvironmentTurn]":
        """The reward, where there are no further turns for a reason of `ENDS`; `turn` is the last, where it is new."""
        reply = self._await_agent()
        self.ending = reason
        if turn is not None:
            self._give(turn)
        elif self._answer is not None:
            self._refuse(f"there are no further turns: {ENDS.get(reason, reason)}; give the reward")
        return reply

    def leave(self) -> None:
        """The seat is gone: the engine was lost, or the run ends."""
        self.ending, self.is_over = self.ending or GIVEN_UP, True
        if self._answer is not None:
            self._refuse(f"the episode is over: {ENDS[GIVEN_UP]}")

    # The agent's side.

    async def ask(
        self, call: ChatCall, on_grown: Callable[[int, str], None] = _unheard
    ) -> tuple[int, PolicyTurn, Message]:
        """The policy's next turn, behind those that are asked for, and its number, from 1 on.

        A request that is sent again gets the same turn: the newest one does, and one whose client hung up before it had
        its turn. Of a call that streams, what the turn says more is given to `on_grown` first, with its number.
        Raises ChatMistake.
        """
        while (asked := self._asked(call)) is None and self._answer is not None:
            await self._turn_ends(self._answer)
        if asked is not None:
            if call.wants_logprobs and not asked.call.wants_logprobs:
                raise ChatMistake("logprobs: the turn was first asked for without them, and stays as it was told then")
            if asked.turn is self._answer:
                self._on_grown = on_grown
                on_grown(asked.number, self._grown)
            return await self._turn(asked)
        if self.ending or self.is_over or self._parting is not None:
            raise ChatMistake(f"there are no further turns: {ENDS.get(self.ending, self.ending)}", code=OVER)
        self.touched_s = self.clock()
        new = self._continued(call) if call.bare is None else ()
        is_branch = new is None
        try:
            messages = call.messages if new is None else new
            tools = call.tools if is_branch or not self.num_turns else ()
            stream = self.session_id if call.is_streamed else ""
            reply = EnvironmentTurn(
                messages,
                tools=tools,
                stream=stream,
                wants_tokens=call.wants_logprobs,
                begins_row=is_branch,
                bare=call.bare,
            )
        except RecordError as error:
            raise ChatMistake(str(error), code="too_long") from None
        if is_branch:
            self._note_branch(call)
        self.said = [*([] if is_branch else self.said), *messages]
        self._answer = asyncio.get_running_loop().create_future()
        self._last = asked = _Asked(call, self.num_turns + 1, self._answer)
        self._on_grown, self._grown = on_grown, ""
        self._tell(reply)
        return await self._turn(asked)

    def reward(self, value: float) -> None:
        """The agent has played to the end. Raises ChatMistake."""
        self._check_idle()
        if not self.num_turns and not self.ending:
            self._end(EnvironmentTurn.failed(WRONG_TYPE, "the agent gave a reward before it asked the policy anything"))
            raise ChatMistake("the policy was asked nothing; the episode counts as failed", code="no_turn")
        try:
            last = EnvironmentTurn(done=True, reward=value, reason=self.ending or DONE)
        except RecordError as error:
            raise ChatMistake(str(error), code="not_finite") from None
        self._end(last)

    def fail(self, words: str, kind: str = RAISED) -> None:
        """The agent gives up, and says why; while the policy has its turn, too. Raises ChatMistake.

        `kind` is a key of `FAILURES`.

        Where the policy has had all its turns, that is no failure of the agent: such an episode is worth 0.
        """
        self._check_open()
        cut_short = EnvironmentTurn(done=True, reward=0.0, reason=self.ending) if self.ending else None
        self._parting = cut_short or EnvironmentTurn.failed(kind, words)
        if self._answer is not None:
            self._refuse("its agent gave up")
        if self._reply is not None:
            self._end(self._parting)

    def expire(self, idle_s: float) -> bool:
        """Whether the agent has said nothing for too long; the episode is given up then, no fault of its policy's.

        It is heard in the episodes `beside` it as well, and may have to wait for a turn in one of these: then it is
        given `IDLE_BESIDE_TURNS` times as long.
        """
        heard_s = max(one.touched_s for one in (self, *self.beside))
        waits = any(one._reply is None and not one.is_over for one in self.beside)
        most_s = idle_s * (IDLE_BESIDE_TURNS if waits else 1)
        is_idle = self._reply is not None and self.clock() - heard_s > most_s
        if is_idle:
            self.give_up(f"its agent said nothing for {idle_s:g} s")
        return is_idle

    def give_up(self, words: str) -> bool:
        """Nobody plays it any more, no fault of its policy's; where that has its turn, the episode ends behind it.

        False where it has failed before that, which the seat hears then.
        """
        if self._parting is not None:
            return False
        self.ending = GIVEN_UP
        self._parting = EnvironmentTurn(done=True, reason=GIVEN_UP, words=words)
        if self._answer is not None:
            self._refuse("its agent is gone")
        if self._reply is not None:
            self._end(self._parting)
        return True

    # Within.

    def _asked(self, call: ChatCall) -> _Asked | None:
        """The earlier request that this one repeats."""
        for asked in self._unread:
            if asked.call.is_same(call):
                return asked
        return self._last if self._last is not None and self._last.call.is_same(call) else None

    def _continued(self, call: ChatCall) -> tuple[Message, ...] | None:
        """The new messages of a request; None for a branch, which does not go on from what was said.

        Behind a text without roles every request with messages is one.
        Raises ChatMistake where there is nothing for the policy to answer.
        """
        if not call.messages or call.messages[-1].role == "assistant":
            raise ChatMistake("messages: wanted something for the policy to answer behind what it said itself")
        known, new = call.messages[: len(self.said)], call.messages[len(self.said) :]
        is_said = any(one.role == "assistant" for one in new)
        if not self.num_turns and is_said:
            raise ChatMistake("messages: the policy has said nothing yet, and one of them is the assistant's")
        has_same_tools = self._last is None or call.tools == self._last.call.tools
        goes_on = len(known) == len(self.said) and all(map(is_same, self.said, known))
        goes_on = goes_on and (self._last is None or self._last.call.bare is None)
        return new if goes_on and has_same_tools and not is_said else None

    def _note_branch(self, call: ChatCall) -> None:
        """A person is told of the run's first, and where it left what was said: it may be none that was meant."""
        if not self.counts["branches"]:
            common = list(zip(self.said, call.messages, strict=False))
            place = next((at for at, pair in enumerate(common) if not is_same(*pair)), len(common))
            has_same_tools = self._last is not None and call.tools == self._last.call.tools
            parting = f"messages[{place}]" if has_same_tools or place < len(common) else "tools"
            log.info("an agent has rewritten its conversation: a new row begins", task=self.task, at=parting)
        self.counts["branches"] += 1

    def _check_open(self) -> None:
        self.touched_s = self.clock()
        if self.is_over or self._parting is not None:
            raise ChatMistake(f"the episode is over: {ENDS.get(self.ending, self.ending) or DONE}", code=OVER)

    def _check_idle(self) -> None:
        self._check_open()
        if self._answer is not None or self._reply is None:
            raise ChatMistake("the policy has its turn; give the reward when it has answered", code="busy")

    async def _turn_ends(self, answer: "asyncio.Future[PolicyTurn]") -> None:
        if self._num_waiting >= MAX_WAITING:
            raise ChatMistake(f"{MAX_WAITING} requests of the session wait for turns already", code="busy", status=429)
        self._num_waiting += 1
        try:
            await asyncio.wait([answer])
        finally:
            self._num_waiting -= 1

    async def _turn(self, asked: _Asked) -> tuple[int, PolicyTurn, Message]:
        try:
            turn = await asyncio.shield(asked.turn)
        except asyncio.CancelledError:  # the client has hung up: the turn is there for its next request
            if not asked.is_read and asked not in self._unread:
                self._unread.append(asked)
            raise
        asked.is_read = True
        if asked in self._unread:
            self._unread.remove(asked)
        return asked.number, turn, said_by(turn)

    def _give(self, turn: PolicyTurn) -> None:
        """The policy's turn, to the agent that waits for it."""
        self.touched_s = self.clock()
        self.num_turns += 1
        self.said.append(said_by(turn))
        if self._answer is not None:
            self._answer.set_result(turn)
            self._answer = None

    def _refuse(self, words: str) -> None:
        assert self._answer is not None
        self._answer.add_done_callback(asyncio.Future.exception)  # nobody may be there to hear it
        self._answer.set_exception(ChatMistake(words, code=OVER))
        self._answer, self._last = None, None
        self.touched_s = self.clock()

    def _await_agent(self) -> "asyncio.Future[EnvironmentTurn]":
        reply = self._reply = asyncio.get_running_loop().create_future()
        if self._parting is not None:
            self._end(self._parting)
        return reply

    def _tell(self, turn: EnvironmentTurn) -> None:
        assert self._reply is not None
        reply, self._reply = self._reply, None
        if not reply.done():
            reply.set_result(turn)

    def _end(self, last: EnvironmentTurn) -> None:
        self.is_over, self.ending = True, self.ending or last.reason
        self._tell(last)
