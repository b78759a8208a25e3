"""All sessions of a gateway: each is offered by a seat, taken by an agent, and over at last."""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from mrl.gateway.chat_wire import ChatRefusal
from mrl.gateway.session import OVER, AgentSession
from mrl.records.direct_requests import TurnChunk

MAX_WAITING_AGENTS = 4096
"""Agents that wait for an episode, at most; further agents are told to come later."""
MAX_WAIT_S = 60.0
"""Seconds that a request for an episode may wait, at most."""
MAX_REMEMBERED = 4096
"""Sessions that are remembered after their end, so that their agents are told that they are over."""


class SessionRegistry:
    """Sessions that are offered or played, and counts since the start. Lives in one event loop."""

    def __init__(self, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s, self._clock = idle_s, clock
        self._offered: deque[AgentSession] = deque()
        self._taken: dict[str, AgentSession] = {}
        self._over: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._lost: deque[str] = deque(maxlen=MAX_REMEMBERED)
        """Names of processes that ended: a request of such a process may still wait for an episode."""
        self._came = asyncio.Event()
        """Set when an episode is offered."""
        self._num_waiting = 0
        self._unserved: dict[str, float] = {}
        """Task -> clock time at which an agent last took an episode of it, or its first episode was offered."""
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of sessions that are played."""
        return len(self._taken)

    @property
    def num_offered(self) -> int:
        """Number of episodes that wait for an agent."""
        return len(self._offered)

    @property
    def num_waiting(self) -> int:
        """Number of agents' requests that wait for an episode."""
        return self._num_waiting

    def offer(self, policy: str, task: str, row: dict[str, Any]) -> AgentSession:
        """Add an episode of a policy, for any agent to take."""
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
        """Return one episode of each policy, all from one start state of `task`; "" stands for any policy or task.

        With one policy, `name` becomes the session's id, and a later call with that name returns the same session.
        `player` names the process that plays, for `lose`. Return [] when no episode comes within `wait_s`.
        Raises ChatRefusal, also where the session `name` has another policy or task, or is over.
        """
        if self._num_waiting >= MAX_WAITING_AGENTS:
            raise ChatRefusal("too many agents are waiting for episodes; try again later", code="too_many", status=429)
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
        """Return a session that is played. Raises ChatRefusal for a session that is over, or never was."""
        if session_id in self._taken:
            return self._taken[session_id]
        if session_id in self._over:
            raise ChatRefusal("the session is over", code="episode_over", status=410)
        raise ChatRefusal("no such session; open one with POST /v1/sessions", code="no_session", status=404)

    def grew(self, piece: TurnChunk) -> None:
        """Pass on a piece of a turn to its session, if that is still played."""
        if (session := self._taken.get(piece.session)) is not None:
            session.grew(piece)

    def leave(self, session: AgentSession) -> None:
        """Remove a session whose seat has hung up, before or after the last reply."""
        session.leave()
        if session in self._offered:
            self._offered.remove(session)
        if self._taken.pop(session.session_id, None) is not None:
            self._over.append(session.session_id)
            self.counts[f"ends/{session.ending}"] += 1

    def expire(self) -> list[AgentSession]:
        """Give up the sessions whose agents are silent for too long, and return them."""
        found = [session for session in self._taken.values() if session.expire(self._idle_s)]
        self.counts["expired"] += len(found)
        return found

    def lose(self, player: str) -> int:
        """Give up the episodes of a process that has ended, and return their number."""
        self._lost.append(player)
        played = [session for session in self._taken.values() if session.player == player and not session.is_over]
        num_lost = sum(session.give_up("the agent process exited") for session in played)
        self.counts["expired"] += num_lost
        return num_lost

    def unserved_s(self) -> dict[str, float]:
        """Task with waiting episodes -> seconds since an agent last took an episode of it, or since the first offer."""
        waiting = {session.task for session in self._offered}
        return {task: self._clock() - since for task, since in self._unserved.items() if task in waiting}

    def _named(self, name: str, policy: str, task: str) -> list[AgentSession]:
        if name and name in self._over:
            raise ChatRefusal(f"session {name} is over; use another name for the next session", code=OVER, status=410)
        if (session := self._taken.get(name)) is None:
            return []
        if policy not in ("", session.policy) or task not in ("", session.task):
            words = f"session {name} is for policy {session.policy} and task {session.task}; use another name"
            raise ChatRefusal(words, code="other_session", status=409)
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
        """Return an offered session of each policy, all from the first start state that has them; else []."""
        places: dict[tuple[str, str], dict[str, AgentSession]] = {}
        for session in offered:
            at = places.setdefault((session.task, session.start_state), {})
            at.setdefault(session.policy, session)
            at.setdefault("", session)
            if all(policy in at for policy in policies):
                return [at[policy] for policy in policies]
        return []
