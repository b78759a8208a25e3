"""One episode between its seat, which is the environment process of a rollout worker, and the agent that plays it.

The seat asks for one reply at a time and waits for it: the agent's first messages, its answer to a turn of the policy,
the reward. Requests that the agent makes at the same time get their turns one after another. All calls of a session are
made in one event loop.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from mrl.errors import RecordError
from mrl.gateway.chat_wire import ChatCall, ChatRefusal, is_same, said_by
from mrl.records.canonical_json import canonical_json
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import Message
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
"""Requests of a session that wait for turns, and turns that are kept for clients that hung up before them, at most."""
IDLE_BESIDE_TURNS = 10
"""Factor by which an agent may be silent for longer while it waits for another policy's turn. There is a limit, since
two policies may wait for each other."""
OVER = "episode_over"
"""Code of a refusal when the episode has no further turns."""


def _unheard(number: int, text: str) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Asked:
    """An agent's request, and the policy's turn that answers it."""

    call: ChatCall
    number: int
    turn: "asyncio.Future[PolicyTurn]"
    is_read: bool = False
    """Whether a client has been given the turn."""


@dataclass(eq=False)
class AgentSession:
    """An episode of one policy. `row` is the task's row for the agent, with the seed, as JSON values."""

    session_id: str
    policy: str
    task: str
    row: dict[str, Any]
    clock: Callable[[], float] = time.monotonic
    said: list[Message] = field(default_factory=list)
    """The conversation so far, from both sides."""
    num_turns: int = 0
    touched_s: float = 0.0
    """Clock time at which the agent last made a request, or the policy last answered one."""
    ending: str = ""
    """Why there are no further turns; "" while there may be."""
    is_over: bool = False
    """Whether the seat has got its last reply, or is gone."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of the SessionRegistry; the session adds to "branches"."""
    player: str = ""
    """Name of the process that plays the episode, if the gateway started the process."""
    beside: tuple["AgentSession", ...] = ()
    """Sessions of other policies that the same agent took together with this one."""
    start_state: str = field(init=False)
    """`row` as canonical JSON: equal for the episodes of a group, and for those of peers from the same start state."""
    _reply: "asyncio.Future[EnvironmentTurn] | None" = None
    """The reply that the seat waits for; None while it waits for none."""
    _answer: "asyncio.Future[PolicyTurn] | None" = None
    """The turn that the agent waits for; None while it waits for none."""
    _parting: EnvironmentTurn | None = None
    """The last reply to the seat, sent at once, or when the seat next asks."""
    _on_grown: Callable[[int, str], None] = _unheard
    """Takes each piece of the turn while it is sampled: (number of the turn, text of the piece)."""
    _grown: str = ""
    """Text of the turn so far."""
    _num_waiting: int = 0
    """Requests that wait for the turn of another request."""
    _last: _Asked | None = None
    """The newest request that has, or had, the policy's turn."""
    _unread: deque[_Asked] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    """Requests whose clients hung up before they were given their turns."""

    def __post_init__(self) -> None:
        self.touched_s = self.clock()
        self.start_state = canonical_json(self.row)

    # The seat's side.

    def opened(self) -> "asyncio.Future[EnvironmentTurn]":
        """Return the future of the agent's first messages."""
        return self._await_agent()

    def step(self, turn: PolicyTurn) -> "asyncio.Future[EnvironmentTurn]":
        """Give a turn of the policy to the agent, and return the future of the agent's answer."""
        reply = self._await_agent()
        self._give(turn)
        return reply

    def grew(self, piece: TurnChunk) -> None:
        """Pass on a piece of the turn that is being sampled. A piece that is late, or follows a gap, is dropped: the
        whole turn has its text, too."""
        if self._answer is not None and (piece.num_turns, piece.start) == (self.num_turns, len(self._grown)):
            self._grown += piece.text
            self._on_grown(self.num_turns + 1, piece.text)

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "asyncio.Future[EnvironmentTurn]":
        """Tell the agent that there are no further turns, for a `reason` of `ENDS`; return the future of the reward.

        `turn` is the last turn, where the agent has not had it.
        """
        reply = self._await_agent()
        self.ending = reason
        if turn is not None:
            self._give(turn)
        elif self._answer is not None:
            self._refuse(f"no further turns: {ENDS.get(reason, reason)}; post the reward")
        return reply

    def leave(self) -> None:
        """End the episode whose seat is gone, as when the engine was lost or the run ends."""
        self.ending, self.is_over = self.ending or GIVEN_UP, True
        if self._answer is not None:
            self._refuse(f"the episode is over: {ENDS[GIVEN_UP]}")

    # The agent's side.

    async def ask(
        self, call: ChatCall, on_grown: Callable[[int, str], None] = _unheard
    ) -> tuple[int, PolicyTurn, Message]:
        """Return number (from 1), turn and message of the policy's next turn, after those that were asked for before.

        A request that is sent again gets the same turn, if it is the newest request, or if its client hung up before it
        was given the turn. Pieces of a streamed turn go to `on_grown` first, with its number. Raises ChatRefusal.
        """
        while (asked := self._asked(call)) is None and self._answer is not None:
            await self._turn_ends(self._answer)
        if asked is not None:
            if call.wants_logprobs and not asked.call.wants_logprobs:
                raise ChatRefusal(
                    "logprobs: the turn was first requested without them, and a repeated request gets the same answer"
                )
            if asked.turn is self._answer:
                self._on_grown = on_grown
                on_grown(asked.number, self._grown)
            return await self._turn(asked)
        if self.ending or self.is_over or self._parting is not None:
            raise ChatRefusal(f"no further turns: {ENDS.get(self.ending, self.ending)}", code=OVER)
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
            raise ChatRefusal(str(error), code="too_long") from None
        if is_branch:
            self._note_branch(call)
        self.said = [*([] if is_branch else self.said), *messages]
        self._answer = asyncio.get_running_loop().create_future()
        self._last = asked = _Asked(call, self.num_turns + 1, self._answer)
        self._on_grown, self._grown = on_grown, ""
        self._tell(reply)
        return await self._turn(asked)

    def reward(self, value: float) -> None:
        """End the episode with the agent's reward. Raises ChatRefusal."""
        self._check_idle()
        if not self.num_turns and not self.ending:
            self._end(
                EnvironmentTurn.failed(WRONG_TYPE, "the agent gave a reward before its first request to the policy")
            )
            raise ChatRefusal(
                "reward before the first request to the policy; the episode counts as failed", code="no_turn"
            )
        try:
            last = EnvironmentTurn(done=True, reward=value, reason=self.ending or DONE)
        except RecordError as error:
            raise ChatRefusal(str(error), code="not_finite") from None
        self._end(last)

    def fail(self, words: str, kind: str = RAISED) -> None:
        """End an episode that its agent cannot finish, also while the policy has its turn. Raises ChatRefusal.

        `kind` is a key of `FAILURES`, `words` say why. Where the policy has had all its turns, the agent has not
        failed: such an episode has reward 0.
        """
        self._check_open()
        cut_short = EnvironmentTurn(done=True, reward=0.0, reason=self.ending) if self.ending else None
        self._parting = cut_short or EnvironmentTurn.failed(kind, words)
        if self._answer is not None:
            self._refuse("the agent reported a failure")
        if self._reply is not None:
            self._end(self._parting)

    def expire(self, idle_s: float) -> bool:
        """Whether the agent was silent for `idle_s`; its episode is given up then, by no fault of the policy.

        A request in a session `beside` this one counts, too. While the agent waits for a turn there, it may be silent
        for `IDLE_BESIDE_TURNS` times as long.
        """
        heard_s = max(one.touched_s for one in (self, *self.beside))
        waits = any(one._reply is None and not one.is_over for one in self.beside)
        most_s = idle_s * (IDLE_BESIDE_TURNS if waits else 1)
        is_idle = self._reply is not None and self.clock() - heard_s > most_s
        if is_idle:
            self.give_up(f"the agent sent no request for {idle_s:g} s")
        return is_idle

    def give_up(self, words: str) -> bool:
        """Give up an episode that no agent plays any more, by no fault of the policy; return whether it was given up.

        While the policy has its turn, the episode ends after the turn. False where the agent failed before: the seat is
        told of that failure.
        """
        if self._parting is not None:
            return False
        self.ending = GIVEN_UP
        self._parting = EnvironmentTurn(done=True, reason=GIVEN_UP, words=words)
        if self._answer is not None:
            self._refuse("the agent is gone")
        if self._reply is not None:
            self._end(self._parting)
        return True

    # Both sides.

    def _asked(self, call: ChatCall) -> _Asked | None:
        """Return the earlier request that this call repeats, or None."""
        for asked in self._unread:
            if asked.call.is_same(call):
                return asked
        return self._last if self._last is not None and self._last.call.is_same(call) else None

    def _continued(self, call: ChatCall) -> tuple[Message, ...] | None:
        """Return the messages that a request adds to the conversation; None for a branch.

        A branch does not repeat the conversation, adds messages of the assistant, or has other tools. After a text
        without roles, every request with messages is a branch. Raises ChatRefusal where the last message is the
        assistant's, or the assistant has messages before the policy's first turn.
        """
        if not call.messages or call.messages[-1].role == "assistant":
            raise ChatRefusal("messages: the last message must be one to answer, not the assistant's own")
        known, new = call.messages[: len(self.said)], call.messages[len(self.said) :]
        is_said = any(one.role == "assistant" for one in new)
        if not self.num_turns and is_said:
            raise ChatRefusal("messages: an assistant message before the policy's first turn")
        has_same_tools = self._last is None or call.tools == self._last.call.tools
        goes_on = len(known) == len(self.said) and all(map(is_same, self.said, known))
        goes_on = goes_on and (self._last is None or self._last.call.bare is None)
        return new if goes_on and has_same_tools and not is_said else None

    def _note_branch(self, call: ChatCall) -> None:
        """Count a branch. Log the run's first, with the place where it leaves the conversation: it may be a mistake."""
        if not self.counts["branches"]:
            common = list(zip(self.said, call.messages, strict=False))
            place = next((at for at, pair in enumerate(common) if not is_same(*pair)), len(common))
            has_same_tools = self._last is not None and call.tools == self._last.call.tools
            parting = f"messages[{place}]" if has_same_tools or place < len(common) else "tools"
            log.info("agent rewrote its conversation; starting a new row", task=self.task, at=parting)
        self.counts["branches"] += 1

    def _check_open(self) -> None:
        self.touched_s = self.clock()
        if self.is_over or self._parting is not None:
            raise ChatRefusal(f"the episode is over: {ENDS.get(self.ending, self.ending) or DONE}", code=OVER)

    def _check_idle(self) -> None:
        self._check_open()
        if self._answer is not None or self._reply is None:
            raise ChatRefusal("the policy is still answering; post the reward after its answer", code="busy")

    async def _turn_ends(self, answer: "asyncio.Future[PolicyTurn]") -> None:
        if self._num_waiting >= MAX_WAITING:
            raise ChatRefusal(
                f"{MAX_WAITING} requests of the session are already waiting for turns", code="busy", status=429
            )
        self._num_waiting += 1
        try:
            await asyncio.wait([answer])
        finally:
            self._num_waiting -= 1

    async def _turn(self, asked: _Asked) -> tuple[int, PolicyTurn, Message]:
        try:
            turn = await asyncio.shield(asked.turn)
        except asyncio.CancelledError:  # the client has hung up: its turn is kept for the same request, sent again
            if not asked.is_read and asked not in self._unread:
                self._unread.append(asked)
            raise
        asked.is_read = True
        if asked in self._unread:
            self._unread.remove(asked)
        return asked.number, turn, said_by(turn)

    def _give(self, turn: PolicyTurn) -> None:
        """Give the policy's turn to the agent that waits for it."""
        self.touched_s = self.clock()
        self.num_turns += 1
        self.said.append(said_by(turn))
        if self._answer is not None:
            self._answer.set_result(turn)
            self._answer = None

    def _refuse(self, words: str) -> None:
        assert self._answer is not None
        self._answer.add_done_callback(asyncio.Future.exception)  # no client may be left to retrieve the exception
        self._answer.set_exception(ChatRefusal(words, code=OVER))
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
