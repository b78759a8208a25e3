"""Faults of a run's processes: which role is hit next, how, and how long it was gone."""

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "pause", "hang"]
KINDS: tuple[Kind, ...] = ("kill", "pause", "hang")
PAUSE_S = 2.0


@dataclass
class Fault:
    """A fault of one process, which was hit at `at_s`."""

    role: str
    kind: Kind
    """"kill": SIGKILL. "pause": SIGSTOP, and SIGCONT after `PAUSE_S`. "hang": SIGSTOP until the supervisor kills it."""
    pid: int
    at_s: float
    replaced_s: float | None = None
    """Seconds until another process of the role was seen; None while there is none."""
    is_over: bool = False


class Saboteur:
    """Hits one role at a time: each role once in a round, in an order shuffled anew for every round."""

    def __init__(self, roles: Sequence[str], kinds: Sequence[Kind], *, every_s: float, seed: int) -> None:
        self._kinds, self._every_s, self._random = tuple(kinds), every_s, random.Random(seed)
        self._roles, self._round = tuple(roles), list[str]()
        self._next_s: float | None = None
        self.faults: list[Fault] = []

    def turn(self, pids: Mapping[str, int], now_s: float, *, more: bool, kill: Callable[[int, int], None]) -> None:
        """Continue paused processes, note replaced ones and, with `more`, hit the next role when it is time.

        `pids`: role -> the process that has it now.
        """
        for fault in self.faults:
            if not fault.is_over:
                self._follow(fault, pids, now_s, kill)
        if self._next_s is None:
            self._next_s = now_s + self._wait_s()
        if more and now_s >= self._next_s:
            self._hit(pids, now_s, kill)

    def _follow(self, fault: Fault, pids: Mapping[str, int], now_s: float, kill: Callable[[int, int], None]) -> None:
        pid = pids.get(fault.role, 0)
        if pid not in (0, fault.pid):
            fault.replaced_s, fault.is_over = now_s - fault.at_s, True
        elif fault.kind == "pause" and now_s - fault.at_s >= PAUSE_S:
            fault.is_over = True
            if pid:
                kill(pid, signal.SIGCONT)

    def _hit(self, pids: Mapping[str, int], now_s: float, kill: Callable[[int, int], None]) -> None:
        busy = {fault.role for fault in self.faults if not fault.is_over}
        if not self._round:
            self._round = self._random.sample(self._roles, len(self._roles))
        role = next((role for role in self._round if pids.get(role) and role not in busy), None)
        if role is None:
            return
        self._round.remove(role)
        kind = self._random.choice(self._kinds)
        kill(pids[role], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self.faults.append(Fault(role, kind, pids[role], now_s))
        self._next_s = now_s + self._wait_s()

    def _wait_s(self) -> float:
        return self._every_s * self._random.uniform(0.8, 1.2)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
