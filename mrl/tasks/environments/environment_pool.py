"""Environments in processes of their own: thousands of episodes at once over a few processes.

    open, step, finish ──▶ queue ──▶ process with room ──reply──▶ future of a turn
                                         ├── an episode is late: it ends alone, its thread is broken off
                                         └── the process is lost: its episodes are played again, suspects alone

There is one thread per episode in a few processes, not one process per episode: most environments wait, for a service
or for their policy, and a waiting thread costs kilobytes. Threads do not protect each other from a crash, from full
memory, and from code that holds the interpreter lock. Then the process is lost. Its idle episodes are played again
elsewhere, and those that ran at that moment each in a process of its own: an episode that takes down a second process
is to blame, and fails.
"""

import itertools
import json
import os
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import RoleFailed
from mrl.tasks.environments.contract import EXITED, GIVEN_UP, LOST, MEMORY, TIMEOUT, EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.environment_child import EnvironmentChild, environment_argv
from mrl.tasks.environments.episode_script import MAX_LOSSES, Script
from mrl.tasks.environments.gateway_location import MARK
from mrl.tasks.environments.wire import Asked, FinishEpisode, OpenEpisode, ProcessBeat, ProcessReady, StepEpisode

MEMORY_BYTES = 4 * 1024**3
MAX_EPISODES = 1024
"""Most episodes of one process at once; further ones wait for a place."""


@dataclass(slots=True)
class EnvironmentCounts:
    """Totals since the pool's start."""

    episodes: int = 0
    turns: int = 0
    tool_errors: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Episodes that their environment ended, or in which it failed, by reason."""
    replays: int = 0
    """Episodes that were played again, because their process was lost."""
    processes: int = 0
    """Processes that were started."""


class EpisodeSession:
    """One episode in a pool. Any thread may use it; one request at a time."""

    def __init__(self, pool: "EnvironmentPool", number: int) -> None:
        self._pool, self.number = pool, number
        self.first: Future[EnvironmentTurn] = Future()
        """Future of the first messages and the tools."""

    def step(self, turn: PolicyTurn) -> "Future[EnvironmentTurn]":
        """Return a future of the environment's answer to a turn of the policy; never waits."""
        return self._pool.ask(StepEpisode(self.number, turn))

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "Future[EnvironmentTurn]":
        """Return a future of the reward of an episode that ends from outside, for a reason of `ENDS`; never waits.

        `turn` is the policy's last turn where it was cut: the environment does not answer it, and may reward it.
        """
        return self._pool.ask(FinishEpisode(self.number, reason, turn))

    def close(self) -> None:
        """Drop the episode; a future still open has the end GIVEN_UP."""
        self._pool.drop(self.number)


class EnvironmentPool:
    """Episodes of one environment ("module:Class" or a URL), in at most `processes` processes.

    As many processes again may run for episodes that are suspected to take their process down.
    """

    def __init__(
        self,
        name: str,
        *,
        processes: int,
        wall_s: float,
        cpu_s: float,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Limits of one episode: `wall_s` seconds of its environment in all, `cpu_s` seconds of the processor.

        `memory_bytes` is the address space of one process. Nothing is started before the first episode is opened.
        """
        self._argv = environment_argv(name, memory_bytes=memory_bytes, cpu_s=cpu_s)
        self._name, self._size, self._wall_s = name, processes, wall_s
        self.numbers = itertools.count()
        self._lock = threading.Lock()
        self._handed_in: deque[tuple[Asked | int, Future[EnvironmentTurn] | None]] = deque()
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="environment-pool", daemon=True)
        # All attributes below belong to the thread.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._children: list[EnvironmentChild] = []
        self._scripts: dict[int, Script] = {}
        self._places: dict[int, EnvironmentChild] = {}
        self._waiting: deque[Script] = deque()
        """Episodes that wait for a place."""
        self.counts = EnvironmentCounts()

    def open(self, seed: int, row: Mapping[str, Any]) -> EpisodeSession:
        """Begin an episode from this seed and row, which are JSON; never waits. `first` is a future of its first turn.

        Futures raise RoleFailed when no process can be started.
        """
        session = EpisodeSession(self, next(self.numbers))
        request = OpenEpisode(session.number, seed, json.dumps(dict(row)))
        self._hand_in(request, session.first)
        return session

    def ask(self, request: Asked) -> "Future[EnvironmentTurn]":
        """Return a future of the answer to a request to an open episode; never waits."""
        future: Future[EnvironmentTurn] = Future()
        self._hand_in(request, future)
        return future

    def drop(self, number: int) -> None:
        """Drop an episode that nobody awaits any more."""
        self._hand_in(number, None)

    def close(self) -> None:
        """End all processes; futures still open have the end GIVEN_UP."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            return
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def _hand_in(self, request: Asked | int, future: "Future[EnvironmentTurn] | None") -> None:
        with self._lock:
            if self._is_closing:
                if future is not None:
                    future.set_result(_given_up())
                return
            self._handed_in.append((request, future))
            if self._thread.ident is None:
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    # The methods below run in the pool's thread.

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                self._take_in()
                self._place_waiting()
                for child, events in self._due():
                    self._attend(child, events)
            except Exception as error:  # noqa: BLE001 - the thread's outer edge: whoever awaits a turn raises it
                self._fail(error)
        self._take_in()
        for script in self._scripts.values():
            script.end(_given_up())
        for child in list(self._children):
            self._end(child)

    def _take_in(self) -> None:
        while self._handed_in:
            request, future = self._handed_in.popleft()
            if isinstance(request, int):
                self._forget(request)
                continue
            assert future is not None
            if isinstance(request, OpenEpisode):
                is_agent = self._name.startswith(MARK)
                self._scripts[request.episode] = Script(request.episode, self._wall_s, waits_for_agent=is_agent)
                self.counts.episodes += 1
            script = self._scripts.get(request.episode)
            if script is None or script.is_over or script.awaits:
                words = "a request came after the end of the episode, or before the answer to the previous one"
                future.set_result(EnvironmentTurn(done=True, reason=GIVEN_UP, words=words))
                continue
            script.add(request, future)
            self._go_on(script)

    def _go_on(self, script: Script) -> None:
        """Send the next request of an episode if it has a place, or queue it for one."""
        child = self._places.get(script.number)
        if child is None:
            self._waiting.append(script)
        elif child.is_ready and script.next_request is not None:
            child.ask(script)
            self._watch(child)

    def _place_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            script = self._waiting.popleft()
            if script.is_over or script.number in self._places or script.number not in self._scripts:
                continue
            child = self._child_for(script)
            if child is None:
                self._waiting.append(script)
                continue
            child.scripts[script.number] = script
            self._places[script.number] = child
            self._go_on(script)

    def _child_for(self, script: Script) -> EnvironmentChild | None:
        """Return the process with most room, or a new one while there may be more; None when all are full."""
        if script.is_alone:
            return None if sum(child.is_alone for child in self._children) >= self._size else self._start(is_alone=True)
        found = [child for child in self._children if child.takes_more]
        best = min(found, key=lambda child: len(child.scripts), default=None)
        if best is None or (best.scripts and len(found) < self._size):
            return self._start(is_alone=False)
        return best if len(best.scripts) < MAX_EPISODES else None

    def _start(self, *, is_alone: bool) -> EnvironmentChild:
        child = EnvironmentChild(self._argv, is_alone=is_alone)
        self._children.append(child)
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        self.counts.processes += 1
        return child

    def _due(self) -> list[tuple[EnvironmentChild, int]]:
        """Wait for an event; return processes that sent something, can take more, or are late (event 0)."""
        earliest = min((child.deadline_s for child in self._children), default=float("inf"))
        timeout = None if earliest == float("inf") else max(0.0, earliest - time.monotonic())
        events = self._selector.select(timeout)
        found = {key.data: mask for key, mask in events if key.data is not None}
        if len(found) < len(events):
            os.eventfd_read(self._wake)
        now_s = time.monotonic()
        late = [child for child in self._children if child.deadline_s <= now_s and child not in found]
        return [*found.items(), *((child, 0) for child in late)]

    def _attend(self, child: EnvironmentChild, events: int) -> None:
        if child not in self._children:
            return
        if events & selectors.EVENT_WRITE:
            child.write()
        if events & selectors.EVENT_READ:
            replies = child.read()
            if replies is None:
                self._lose(child)
                return
            for reply in replies:
                if isinstance(reply, ProcessReady):
                    child.is_ready = True
                    for script in list(child.scripts.values()):
                        self._go_on(script)
                elif isinstance(reply, ProcessBeat):
                    child.hanging = reply.hanging
                elif reply.episode in child.scripts:
                    self._hear(child, child.scripts[reply.episode], reply.turn)
        self._check_times(child)
        if child in self._children and child.is_needless:
            self._end(child)
        if child in self._children:
            self._watch(child)

    def _hear(self, child: EnvironmentChild, script: Script, turn: EnvironmentTurn) -> None:
        """Take the answer of one episode."""
        if script.asked_at_s is None:
            return
        child.answered(script)
        if turn.reason == MEMORY and not child.is_alone:  # which episode took the memory is unknown
            self._lose(child)
            return
        if words := script.answer(turn):
            self._fail_one(child, script, EnvironmentTurn.failed(LOST, words))
            return
        if script.played == len(script.lines):
            self.counts.turns += 1
            self.counts.tool_errors += turn.tool_errors
            if turn.done:
                self.counts.ends[turn.reason] += 1
        if script.is_over:
            self._leave(child, script)
        else:
            self._go_on(script)

    def _check_times(self, child: EnvironmentChild) -> None:
        now_s = time.monotonic()
        if child.deadline_s > now_s or child not in self._children:
            return
        for script in child.late(now_s) if child.is_ready else []:
            self._fail_one(child, script, self._too_late(script))
        if child in self._children and child.deadline_s <= now_s:  # it sends no beat, or does not start
            self._lose(child)

    def _too_late(self, script: Script) -> EnvironmentTurn:
        """Return the end of a late episode. Where no agent has asked yet, it is given up: agents may come late."""
        if script.waits_for_agent and not script.has_begun:
            return _given_up(f"no agent asked for the policy's first turn within {self._wall_s:g} s (episode_s)")
        words = f"no answer within {self._wall_s:g} s, the total time limit of the environment"
        return EnvironmentTurn.failed(TIMEOUT, words)

    def _lose(self, child: EnvironmentChild) -> None:
        """Handle the loss of a process that ended, or that an episode blocks: episodes that ran are suspects."""
        was_ready, code = child.is_ready, self._end(child)
        if not was_ready:
            raise RoleFailed(f"the environment {self._name} does not start (exit code {code}); see the log above")
        for script in child.scripts.values():
            is_suspect = script.asked_at_s is not None
            self._places.pop(script.number, None)
            script.begin_again()
            if is_suspect and child.is_alone:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                self._fail_one(None, script, EnvironmentTurn.failed(EXITED, f"the environment's process {how}"))
            elif script.losses > MAX_LOSSES:
                words = f"{script.losses} processes that the episode shared with others were lost"
                self._fail_one(None, script, EnvironmentTurn.failed(LOST, words))
            else:
                script.is_alone = script.is_alone or is_suspect
                self.counts.replays += 1
                if script.awaits:
                    self._waiting.append(script)

    def _fail_one(self, child: EnvironmentChild | None, script: Script, turn: EnvironmentTurn) -> None:
        self.counts.ends[turn.reason] += 1
        script.end(turn)
        if child is not None:
            self._leave(child, script)

    def _forget(self, number: int) -> None:
        script = self._scripts.pop(number, None)
        if script is None:
            return
        script.end(_given_up())
        if (child := self._places.get(number)) is not None:
            self._leave(child, script)

    def _leave(self, child: EnvironmentChild, script: Script) -> None:
        """Free the place of an episode that is over."""
        self._places.pop(script.number, None)
        child.drop(script)
        if child.is_needless:
            self._end(child)

    def _watch(self, child: EnvironmentChild) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.wants_to_write else 0)
        if child in self._children and self._selector.get_key(child.socket).events != wanted:
            self._selector.modify(child.socket, wanted, child)

    def _fail(self, error: Exception) -> None:
        """Fail all open episodes, since no process starts."""
        self._take_in()
        for script in self._scripts.values():
            for line in script.lines:
                if not line.future.done():
                    line.future.set_exception(error)
            script.is_over = True
        self._waiting.clear()
        self._places.clear()
        for child in list(self._children):
            self._end(child)

    def _end(self, child: EnvironmentChild) -> int:
        """Kill the process and forget it; return its exit code."""
        self._children.remove(child)
        self._selector.unregister(child.socket)
        return child.end()


def _given_up(words: str = "") -> EnvironmentTurn:
    return EnvironmentTurn(done=True, reason=GIVEN_UP, words=words)
