"""The processes of one host: starts, watches, restarts and ends them. Shared by the supervisors of all hosts."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from mrl.config.schema import SupervisionTable
from mrl.fork_server import ForkServer
from mrl.processes import sleep_channel
from mrl.processes.children import Child, is_forked
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.log_lines import ERROR_PREFIX, loud_line, without_launcher
from mrl.processes.planning.plan import HOST_ROLE, ProcessSpec
from mrl.processes.planning.restarts import (
    EndRun,
    Exit,
    RestartPolicy,
    RoleFinished,
    StartAgain,
    how_it_ended,
    is_silent,
)
from mrl.processes.planning.unit_workers import UNIT

STANDSTILL_S = 5.0
LAST_RESORT_S = 2.0
STACKS_S = 1.0
HOST_MARGIN_S = 3.0
"""Seconds beyond `stop_s` for another host to end: its supervisor first gives its own processes `stop_s`."""


class LineSink(Protocol):
    """Receiver of a supervisor's lines for people."""

    def event(self, text: str, now_s: float) -> None:
        """Tell of an event of a role."""

    def line(self, text: str) -> None:
        """Tell one line as it is."""


class HostProcesses:
    """Children of this process, one per spec; the lifecycle decides whether and how long they are restarted."""

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        *,
        table: SupervisionTable,
        is_sync: bool,
        lifecycle: Lifecycle,
        attempt: Path,
        crash: Path,
        told: LineSink,
        life: str = "",
        forks: ForkServer | None = None,
    ) -> None:
        """Logs go to `attempt`, accounts of crashes to `crash`. `life` tells this supervisor from others of the run.

        Processes that `is_forked` allows wait until `forks` is ready, and are its forks.
        """
        self._table, self._lifecycle, self._told = table, lifecycle, told
        self._attempt, self._crash = attempt, crash
        self._life, self._forks = life, forks
        self._children = {spec.name: Child(spec, attempt / spec.log_name, life=life) for spec in specs}
        self._restarts = RestartPolicy(table, sync=is_sync)
        self._due_s: dict[str, float] = dict.fromkeys(self._children, 0.0)
        self._kill_at_s: dict[str, float] = {}
        """Child of a stopped policy, told to end -> time at which it is killed."""
        self._kill_hung_at_s: dict[str, float] = {}
        """Child that hangs -> time at which it is killed; until then it may write its stacks."""
        self._beside: list[Callable[[float], None]] = []
        self._dismissed: set[str] = set()
        """Children that were told to end because their unit goes to another policy: their end is no failure."""
        self._not_before_s: dict[str, float] = {}
        """Child whose lease ended by its failure -> earliest time of its start under a new lease."""
        self._out_until_s: dict[str, float] = {}
        """Child that was given up without ending the run -> time of its next try."""
        self._sent: signal.Signals | None = None
        self._sent_s = self._turned_s = time.monotonic()

    @property
    def num_restarts(self) -> int:
        """Number of restarts so far."""
        return self._restarts.num_restarts

    @property
    def num_alive(self) -> int:
        """Number of living children."""
        return sum(child.alive for child in self._children.values())

    @property
    def is_over(self) -> bool:
        """Whether the end was announced and no child is left, or SIGKILL was sent LAST_RESORT_S ago."""
        if self._sent is None:
            return False
        killed_long_ago = self._sent == signal.SIGKILL and time.monotonic() - self._sent_s > LAST_RESORT_S
        return killed_long_ago or not self.num_alive

    def heard(self, role: str, said_s: float, now_s: float) -> None:
        """Note a heartbeat of `role` that was sent at `said_s`; one that an earlier life sent is ignored.

        Both times are of the monotonic clock, so that setting the host's clock makes no process silent. That clock
        counts from the boot of its host. So `said_s` of another host's supervisor means nothing here, and all
        heartbeats of that supervisor count.
        """
        child = self._children.get(role)
        if child and child.alive and (child.spec.role == HOST_ROLE or said_s >= child.born_s):
            child.beat_s = now_s

    def reached(self, role: str, step: int) -> None:
        """Note that a role has done this step."""
        self._restarts.reached(role, step)

    def place(self, spec: ProcessSpec, now_s: float) -> None:
        """Start this process now, or after the back-off of an earlier failure under the same name."""
        if spec.name not in self._children:
            self._children[spec.name] = Child(spec, self._attempt / spec.log_name, life=self._life)
        self._children[spec.name].spec = spec
        self._dismissed.discard(spec.name)
        self._due_s[spec.name] = max(now_s, self._not_before_s.pop(spec.name, now_s))

    def is_there(self, name: str) -> bool:
        """Whether the process of this name lives or is about to be started."""
        child = self._children.get(name)
        return name in self._due_s or (child is not None and child.alive)

    def is_given_up(self, name: str, now_s: float) -> bool:
        """Whether the process of this name failed so often that it is not restarted for now."""
        return now_s < self._out_until_s.get(name, 0.0)

    def without(self, policies: Iterable[str]) -> list[str]:
        """Return the policies among these without a process on this host: they never had one, or all have ended."""
        served = {child.spec.policy for child in self._children.values()}
        return [policy for policy in policies if policy not in served or policy in self._lifecycle.ended]

    def dismiss(self, name: str, number: signal.Signals) -> None:
        """Send a placed process the signal `number`; its end is no failure."""
        self._due_s.pop(name, None)
        if self._children[name].alive:
            self._dismissed.add(name)
            self._children[name].send(number)

    def say(self, name: str, *words: object) -> bool:
        """Send a message over the socket of a placed process; return False when it cannot be sent."""
        line = self._children[name].line
        return line is not None and sleep_channel.say(line, *words)

    def heard_from(self, name: str) -> list[str]:
        """Return the messages that a placed process has sent over its socket since the last call."""
        line = self._children[name].line
        return [] if line is None else sleep_channel.heard(line)

    def parts(self) -> tuple[Callable[[float], None], ...]:
        """Return the parts of every turn, in order; each takes the time in seconds and may raise OSError."""
        return (self._forgive_standstill, self._read_logs, self._reap, self._kill_silent, self._end_stopped,
                *self._beside, self._start_due)  # fmt: skip

    def every_turn(self, part: Callable[[float], None]) -> None:
        """Add a part to every turn, for a caller that places and dismisses processes."""
        self._beside.append(part)

    def signal_all(self, now_s: float) -> None:
        """Send every child the signal that is due for its end, once."""
        for child in self._children.values():
            due = self._lifecycle.due_signal(now_s, extra_s=_extra_s(child))
            if due is not None and due != child.told_to_end:
                child.told_to_end = due
                child.send(due)
        due = self._lifecycle.due_signal(now_s, extra_s=max(map(_extra_s, self._children.values()), default=0.0))
        if due is not None and due != self._sent:
            self._sent, self._sent_s = due, now_s

    def kill_all(self) -> None:
        """Kill all living children and wait at most a second for their end."""
        for child in self._children.values():
            child.send(signal.SIGKILL)
        deadline_s = time.monotonic() + 1.0
        while any(child.alive and child.poll() is None for child in self._children.values()):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.01)

    def _forgive_standstill(self, now_s: float) -> None:
        """Count no time in which this process stood still (a stopped job, a sleeping laptop) as a child's silence."""
        stood_s = now_s - self._turned_s
        self._turned_s = now_s
        if stood_s > STANDSTILL_S:
            for child in self._children.values():
                child.started_s += stood_s
                child.beat_s = None if child.beat_s is None else child.beat_s + stood_s

    def _read_logs(self, _now_s: float) -> None:
        for child in self._children.values():
            for line in map(loud_line, child.new_lines()):
                if line is not None:
                    self._told.line(f"[{child.spec.name}] {line}")

    def _reap(self, now_s: float) -> None:
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                self._kill_hung_at_s.pop(name, None)
                self._read_logs(now_s)
                self._judge(name, child, code, now_s)

    def _judge(self, name: str, child: Child, code: int, now_s: float) -> None:
        spec = child.spec
        if name in self._dismissed:
            return
        code, reason = child.account(code, free_bytes=shutil.disk_usage(self._attempt).free)
        until_done = spec.restart == "until_done"
        finished = until_done and code == 0
        if self._lifecycle.phase == "stopping" or spec.policy in self._lifecycle.stopped:
            return
        if not finished and not self._lifecycle.restarts(spec.role, spec.policy) and code != 2:
            return
        spares_run = spec.restart in ("leased", "spared")
        match self._restarts.ended(Exit(name, spec.role, code, reason, until_done, spares_run), now_s):
            case RoleFinished():
                self._lifecycle.finished(name, now_s)
            case StartAgain(at_s, given_up):
                child.write_crash(self._crash, code, reason, time.time())
                (self._not_before_s if spec.restart == "leased" else self._due_s)[name] = at_s
                end = how_it_ended(code) + (f", {given_up}" if given_up else "")
                if given_up:
                    self._out_until_s[name] = at_s
                self._told.event(f"{name} {end} ({reason}); {_what_next(spec, given_up, at_s - now_s)}", now_s)
            case EndRun(end_code, why):
                self._lifecycle.end(end_code, why, now_s)
                self._show_tail(child)
                child.write_crash(self._crash, code, reason, time.time())

    def _show_tail(self, child: Child) -> None:
        for line in without_launcher(list(child.tail))[-10:]:
            self._told.line(f"[{child.spec.name}] | {line}")

    def _kill_silent(self, now_s: float) -> None:
        if self._lifecycle.phase == "stopping":
            return
        for name, child in self._children.items():
            if not child.alive:
                continue
            silent = is_silent(self._table, started_s=child.started_s, last_beat_s=child.beat_s, now_s=now_s)
            if silent:
                bound_s = self._table.start_s if silent == "start" else self._table.silence_s
                self._told.event(f"{name} sent no heartbeat for more than {bound_s:g} s and is killed", now_s)
                child.tail.append(f"{ERROR_PREFIX}no heartbeat for more than {bound_s:g} s, killed by the supervisor")
                child.started_s = child.beat_s = now_s
                child.ask_for_stacks()
                self._kill_hung_at_s[name] = now_s + STACKS_S
        for name in [name for name, at_s in self._kill_hung_at_s.items() if now_s >= at_s]:
            del self._kill_hung_at_s[name]
            self._children[name].send(signal.SIGKILL)

    def _end_stopped(self, now_s: float) -> None:
        """End the processes of policies that a person stopped; a learner saves a checkpoint first."""
        if self._lifecycle.phase == "stopping":
            return
        stopped = {
            name: child for name, child in self._children.items() if child.spec.policy in self._lifecycle.stopped
        }
        for name, child in stopped.items():
            if name not in self._kill_at_s:
                self._kill_at_s[name] = now_s + self._table.stop_s
                child.send(signal.SIGTERM)
            elif now_s >= self._kill_at_s[name]:
                child.send(signal.SIGKILL)
        for policy in {child.spec.policy for child in stopped.values()} - self._lifecycle.ended:
            if not any(child.alive for child in stopped.values() if child.spec.policy == policy):
                self._lifecycle.ended.add(policy)

    def _start_due(self, now_s: float) -> None:
        for name in [name for name, at_s in self._due_s.items() if at_s <= now_s]:
            child = self._children[name]
            if is_forked(child.spec) and self._awaits_forks(now_s):
                continue
            del self._due_s[name]
            if name not in self._lifecycle.done and self._lifecycle.restarts(child.spec.role, child.spec.policy):
                child.start(os.environ, now_s=now_s, crash=self._crash, forks=self._forks)
                self._restarts.started(name, now_s)

    def _awaits_forks(self, now_s: float) -> bool:
        if self._forks is None:
            return False
        if not self._forks.is_settled(self._table.start_s):
            return True
        if not self._forks.is_ready:
            self._told.event("the fork server died or hangs: from now on each process imports its own modules", now_s)
            self._forks = None
        return False


def _extra_s(child: Child) -> float:
    return HOST_MARGIN_S if child.spec.role == HOST_ROLE else 0.0


def _what_next(spec: ProcessSpec, given_up: str, wait_s: float) -> str:
    if given_up and UNIT in spec.env:
        return f"unit {spec.env[UNIT]} is out of service for {wait_s:.0f} s"
    return f"starts again in {wait_s:.1f} s"
