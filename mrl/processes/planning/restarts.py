"""What becomes of a process that ended: started again later, finished, or the end of the run. No process in sight."""

import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from mrl.config.schema import SupervisionTable

USER_ERROR = 2
MAX_BACKOFF_S = 16.0
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Between tries of what was given up and does not end the run."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Exit:
    """A process ended with `code` (negative: the signal); `reason` is what its log says last."""

    name: str
    role: str
    code: int
    reason: str
    until_done: bool
    spares_run: bool = False
    """Given up, it is tried again after a pause, and the run goes on without it."""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the process again at `at_s`."""

    at_s: float
    given_up: str = ""
    """Why it is left alone for so long; empty for a wait between restarts."""


@dataclass(frozen=True, slots=True)
class RoleFinished:
    """The process did what it was for."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run cannot go on."""

    code: int
    reason: str


Verdict = StartAgain | RoleFinished | EndRun


@dataclass
class _History:
    starts: int = 0
    started_s: float = 0.0
    restarts_s: deque[float] = field(default_factory=deque)
    """Those within `window_s`."""
    counted: deque[tuple[float, int]] = field(default_factory=deque)
    """Those within a day, and those since it last got beyond the step that it had reached then: time and that step."""
    reached: int = -1
    """The farthest step of which it told, in any life."""
    short_lives: int = 0
    num_pauses: int = 0
    """Since its last life that was not short."""

    @property
    def is_stuck(self) -> bool:
        """Whether it has got no further since the first restart that counts."""
        return bool(self.counted) and -1 < self.reached == self.counted[0][1]


class RestartPolicy:
    """Counts starts and ends of every process, by name.

    Waits double from `backoff_s` with every restart within `window_s`. The run ends on exit code 2, when a process
    fails again after `max_restarts` restarts within `window_s`, when twice as many lives in a row were shorter than
    `window_s` (a slow start would otherwise hide an endless loop), and when a learner needs more than
    `max_learner_restarts` within a day, or since it last got further. A learner of a synchronous run, and the
    supervisor of a host with such learners, is never started again: the others cannot go back to where it would begin.

    What spares the run is given up in its place: tried once after a pause, which doubles up to `MAX_PAUSE_S` until a
    life was no shorter than `window_s`.
    """

    def __init__(self, table: SupervisionTable, *, sync: bool = False) -> None:
        self._table, self._sync = table, sync
        self._histories: dict[str, _History] = {}

    @property
    def num_restarts(self) -> int:
        """Restarts so far, over all processes."""
        return sum(max(0, history.starts - 1) for history in self._histories.values())

    def started(self, name: str, now_s: float) -> None:
        """The process was started (again)."""
        history = self._histories.setdefault(name, _History())
        history.starts += 1
        history.started_s = now_s

    def reached(self, name: str, step: int) -> None:
        """The process told of this step; who tells of none is held to the day alone."""
        if name in self._histories:
            self._histories[name].reached = max(self._histories[name].reached, step)

    def ended(self, end: Exit, now_s: float) -> Verdict:
        """The process ended while the run goes on."""
        if end.until_done and end.code == 0:
            return RoleFinished()
        if end.code == USER_ERROR:
            return EndRun(USER_ERROR, f"{end.name}: {end.reason}")
        history = self._histories.setdefault(end.name, _History(starts=1))
        while history.restarts_s and now_s - history.restarts_s[0] > self._table.window_s:
            history.restarts_s.popleft()
        while history.counted and now_s - history.counted[0][0] > DAY_S and not history.is_stuck:
            history.counted.popleft()
        is_short = now_s - history.started_s < self._table.window_s
        history.short_lives = history.short_lives + 1 if is_short else 0
        history.num_pauses = history.num_pauses if is_short else 0
        given_up = self._given_up(end, history)
        if given_up and end.spares_run:
            pause_s = min(FIRST_PAUSE_S * 2**history.num_pauses, MAX_PAUSE_S)
            history.num_pauses += 1
            return StartAgain(now_s + pause_s, given_up)
        if given_up:
            return EndRun(1, f"{end.name} {how_it_ended(end.code)}, {given_up}: {end.reason}")
        wait_s = min(self._table.backoff_s * 2 ** len(history.restarts_s), MAX_BACKOFF_S)
        history.restarts_s.append(now_s + wait_s)
        history.counted.append((now_s + wait_s, history.reached))
        return StartAgain(now_s + wait_s)

    def _given_up(self, end: Exit, history: _History) -> str:
        table = self._table
        if end.role in ("learner", "supervisor") and self._sync and not end.spares_run:
            return "and a synchronous run goes on from a common step only (--resume)"
        if end.role == "learner" and len(history.counted) >= table.max_learner_restarts:
            why = f", and no life got beyond step {history.reached}" if history.is_stuck else " within a day"
            return f"after {table.max_learner_restarts} restarts{why}"
        if history.num_pauses:
            return f"again within {table.window_s:g} s of its start"
        if len(history.restarts_s) >= table.max_restarts:
            return f"after {table.max_restarts} restarts within {table.window_s:g} s"
        if history.short_lives > 2 * table.max_restarts:
            return f"{history.short_lives} times in a row within {table.window_s:g} s of its start"
        return ""


def how_it_ended(code: int) -> str:
    """ "exited with code 1" or "was killed by signal 15"; who lacks memory is killed by the kernel with 9."""
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (by the kernel if memory was short)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def is_silent(
    table: SupervisionTable, *, started_s: float, last_beat_s: float | None, now_s: float
) -> Literal["", "start", "beat"]:
    """Whether a living process hangs: "start" when it never spoke, "beat" when it fell silent, else ""."""
    if last_beat_s is None:
        return "start" if now_s - started_s > table.start_s else ""
    return "beat" if now_s - last_beat_s > table.silence_s else ""
