"""Decide what follows the end of a process: a restart, its completion, or the end of the run. Touches no process."""

import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from mrl.config.schema import SupervisionTable

USER_ERROR = 2
MAX_BACKOFF_S = 16.0
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Seconds of the first and of the longest pause before a process that was given up without ending the run is tried."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process with exit code `code` (negative: the signal), for the `reason` in its log."""

    name: str
    role: str
    code: int
    reason: str
    until_done: bool
    spares_run: bool = False
    """Whether the run goes on without the process once it is given up; it is then tried again after a pause."""


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Start the process again at `at_s`."""

    at_s: float
    given_up: str = ""
    """Why the process is given up until `at_s`; "" for the usual wait before a restart."""


@dataclass(frozen=True, slots=True)
class RoleFinished:
    """The process has done its work."""


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
    """Times of the restarts within `window_s`."""
    counted: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, step reached by then) of the restarts within a day; older ones stay until the process gets further."""
    reached: int = -1
    """Largest step that the process told of, in any life; -1 for none."""
    short_lives: int = 0
    num_pauses: int = 0
    """Pauses since the last life that was not short."""

    @property
    def is_stuck(self) -> bool:
        """Whether the process has got no further since the first restart in `counted`."""
        return bool(self.counted) and -1 < self.reached == self.counted[0][1]


class RestartPolicy:
    """Counts starts and ends of every process, by name, and decides about restarts.

    The wait before a restart doubles from `backoff_s` with every restart within `window_s`. The run ends:
    - on exit code 2;
    - when a process fails again after `max_restarts` restarts within `window_s`;
    - when more than 2 * `max_restarts` lives in a row were shorter than `window_s`: a slow start would otherwise hide
      an endless loop;
    - when a learner needs more than `max_learner_restarts` within a day, or since it last got further;
    - when a learner of a synchronous run, or the supervisor of a host with such a learner, has failed: the other
      learners cannot go back to the step from which it would start.

    A process that spares the run is given up instead: it is tried once after each pause, and the pause doubles up to
    `MAX_PAUSE_S` until a life lasts `window_s`.
    """

    def __init__(self, table: SupervisionTable, *, sync: bool = False) -> None:
        self._table, self._sync = table, sync
        self._histories: dict[str, _History] = {}

    @property
    def num_restarts(self) -> int:
        """Number of restarts so far, over all processes."""
        return sum(max(0, history.starts - 1) for history in self._histories.values())

    def started(self, name: str, now_s: float) -> None:
        """Note a start of the process."""
        history = self._histories.setdefault(name, _History())
        history.starts += 1
        history.started_s = now_s

    def reached(self, name: str, step: int) -> None:
        """Note a step that the process told of. A process that tells of none is held to its restarts within a day."""
        if name in self._histories:
            self._histories[name].reached = max(self._histories[name].reached, step)

    def ended(self, end: Exit, now_s: float) -> Verdict:
        """Decide what follows the end of a process while the run goes on."""
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
            return "and a synchronous run can continue only from a common step (--resume)"
        if end.role == "learner" and len(history.counted) >= table.max_learner_restarts:
            why = f" without getting beyond step {history.reached}" if history.is_stuck else " within a day"
            return f"after {table.max_learner_restarts} restarts{why}"
        if history.num_pauses:
            return f"again within {table.window_s:g} s of its start"
        if len(history.restarts_s) >= table.max_restarts:
            return f"after {table.max_restarts} restarts within {table.window_s:g} s"
        if history.short_lives > 2 * table.max_restarts:
            return f"{history.short_lives} times in a row within {table.window_s:g} s of its start"
        return ""


def how_it_ended(code: int) -> str:
    """Return "exited with code 1" or "was killed by signal 15"; the kernel sends 9 where memory runs out."""
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (possibly out of memory)"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def is_silent(
    table: SupervisionTable, *, started_s: float, last_beat_s: float | None, now_s: float
) -> Literal["", "start", "beat"]:
    """Return "start" for a living process that never sent a heartbeat, "beat" if its heartbeats stopped, else ""."""
    if last_beat_s is None:
        return "start" if now_s - started_s > table.start_s else ""
    return "beat" if now_s - last_beat_s > table.silence_s else ""
