"""All sessions of a gateway: offered by seats, taken by agents, over."""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from mrl.gateway.chat_wire import ChatMistake
from mrl.gateway.session import OVER, AgentSession
from mrl.records.plain_requests import TurnPiece

MAX_WAITING_AGENTS = 4096
"""Agents that wait for an episode; further ones are told to come later."""
MAX_WAIT_S = 60.0
MAX_REMEMBERED = 4096
"""Sessions that are over, whose agents are told so."""


class SessionBook:
    """Everything that is open, and totals since the start. It belongs to one event loop."""

    def __init__(self, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s, self._clock = idle_s, clock
        self._offered: deque[AgentSession] = deque()
        self._taken: dict[str, AgentSession] = {}
        self._over: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._lost: deque[str] = deque(maxlen=MAX_REMEMBERED)
        """Players that are lost: a request of one may still wait for an episode."""
        self._came = asyncio.Event()
        """An episode was offered."""
        self._num_waiting = 0
        self._unserved: dict[str, float] = {}
        """Task -> since when its episodes wait and no agent takes any."""
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Sessions that are played."""
        return len(self._taken)

    @property
    def num_offered(self) -> int:
        """Episodes that wait for an agent."""
        return len(self._offered)

    @property
    def num_waiting(self) -> int:
        """Agents that wait for an episode."""
        return self._num_waiting

    def offer(self, policy: str, task: str, row: dict[str, Any]) -> AgentSession:
        """An episode that some agent is to play."""
        session = AgentSession(secrets.token_hex(12), policy, task, row, self._clock, counts=self.counts)
        self._offered.append(session)
        self._unserved.setdefault(task, self._clock())
        self._came.set()
        self.counts["offered"] += 1
        return session

    async def take(
        self,
        policies: Sequence[str] = ("",),
        *,
        task: str = "",
        wait_s: float = MAX_WAIT_S,
        name: str = "",
        player: str = "",
    ) -> list[AgentSession]:
        """One episode of each of these policies, all from one start state of this task; "" stands for any.

        The one of a single policy has that `name` from then on, and whoever asks again by the name gets it again.
        `player` is who can be lost as a whole (`lose`).
        Empty when there are none within `wait_s`. Raises ChatMistake, also where it has another policy or task.
        """
        if self._num_waiting >= MAX_WAITING_AGENTS:
            raise ChatMistake("too many agents wait for episodes; come later", code="too_many", status=429)
        deadline_s = self._clock() + min(wait_s, MAX_WAIT_S)
        self._num_waiting += 1
        try:
            while not (sessions := self._named(name, policies[0], task) or self._pop(policies, task, name, player)):
                self._came.clear()
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    return []
                try:
                    await asyncio.wait_for(self._came.wait(), left_s)
                except TimeoutError:
                    return []
        finally:
            self._num_waiting -= 1
        return sessions

    def session(self, session_id: str) -> AgentSession:
        """A session that is played. Raises ChatMistake for one that is over, or never was."""
        if session_id in self._taken:
            return self._taken[session_id]
        if session_id in self._over:
            raise ChatMistake("the session is over", code="episode_over", status=410)
        raise ChatMistake("no such session; POST /v1/sessions gives one", code="no_session", status=404)

    def grew(self, piece: TurnPiece) -> None:
        """A worker tells how a turn of a session grows, which may be over."""
        if (session := self._taken.get(piece.session)) is not None:
            session.grew(piece)

    def leave(self, session: AgentSession) -> None:
        """Its seat is gone, or has the last reply."""
        session.leave()
        if session in self._offered:
            self._offered.remove(session)
        if self._taken.pop(session.session_id, None) is not None:
            self._over.append(session.session_id)
            self.counts[f"ends/{session.ending}"] += 1

    def expire(self) -> list[AgentSession]:
        """Give up what agents have left lying, and say which."""
        found = [session for session in self._taken.values() if session.expire(self._idle_s)]
        self.counts["expired"] += len(found)
        return found

    def lose(self, player: str) -> int:
        """Give up what a process played that has ended; returns how many episodes these are."""
        self._lost.append(player)
        played = [session for session in self._taken.values() if session.player == player and not session.is_over]
        num_lost = sum(session.give_up("the process that played it has ended") for session in played)
        self.counts["expired"] += num_lost
        return num_lost

    def unserved_s(self) -> dict[str, float]:
        """Task -> for how long its episodes wait and no agent has taken any."""
        waiting = {session.task for session in self._offered}
        return {task: self._clock() - since for task, since in self._unserved.items() if task in waiting}

    def _named(self, name: str, policy: str, task: str) -> list[AgentSession]:
        if name and name in self._over:
            raise ChatMistake(f"session {name} is over; the next one needs another name", code=OVER, status=410)
        if (session := self._taken.get(name)) is None:
            return []
        if policy not in ("", session.policy) or task not in ("", session.task):
            words = f"session {name} is one of {session.policy} and task {session.task}; another one needs another name"
            raise ChatMistake(words, code="other_session", status=409)
        session.touched_s = self._clock()
        return [session]

    def _pop(self, policies: Sequence[str], task: str, name: str, player: str) -> list[AgentSession]:
        if player in self._lost:
            return []
        found = self._together(policies, [one for one in self._offered if task in ("", one.task)])
        for session in found:
            self._offered.remove(session)
            session.session_id, session.player = name or session.session_id, player
            self._taken[session.session_id] = session
            self._unserved[session.task] = session.touched_s = self._clock()
            session.beside = tuple(one for one in found if one is not session)
        return found

    def _together(self, policies: Sequence[str], offered: Sequence[AgentSession]) -> list[AgentSession]:
        """The first that are there for all of the policies, from one start state."""
        places: dict[tuple[str, str], dict[str, AgentSession]] = {}
        for session in offered:
            at = places.setdefault((session.task, session.start_state), {})
            at.setdefault(session.policy, session)
            at.setdefault("", session)
            if all(policy in at for policy in policies):
                return [at[policy] for policy in policies]
        return []
