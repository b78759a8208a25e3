"""Simulated supervisor of a host: the real supervision, and the real node of units, over simulated processes."""

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.processes.host_processes import HostProcesses
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import ProcessSpec
from mrl.processes.planning.unit_workers import UNIT, UNIT_EPOCH, units_of
from mrl.processes.unit_node import UnitNode
from run_simulation.daemons import AllocatorProcess, ExchangeProcess, open_link
from run_simulation.policies import LearnerProcess, WorkerProcess
from run_simulation.world import Ended, Host, Process

if TYPE_CHECKING:
    from run_simulation.network import Link
    from run_simulation.trial import Run

TICK_S, BEAT_S = 0.3, 1.0
START_S, KILL_S = (0.2, 1.5), (0.0, 0.6)
ESCAPES_SHARE, ESCAPES_S = 0.4, (0.0, 15.0)
ROLES: Mapping[str, Any] = {
    "exchange": ExchangeProcess, "allocator": AllocatorProcess, "learner": LearnerProcess, "worker": WorkerProcess,
}  # fmt: skip


class SimulatedChild:
    """Simulated child process of a supervisor, in place of `mrl.processes.children.Child`."""

    run: "Run"
    """Run that is being simulated."""

    def __init__(self, spec: ProcessSpec, log: Path, *, life: str = "") -> None:
        self.spec, self.log = spec, log
        self.started_s = self.born_s = 0.0
        self.beat_s: float | None = None
        self.tail: list[str] = []
        self.told_to_end: signal.Signals | None = None
        self.line = None
        self._process: Process | None = None
        supervisor = self.run.world.current
        assert supervisor is not None
        self._supervisor, self._host = supervisor, supervisor.host
        supervisor.on_end.append(lambda with_host: self._kill(with_host=with_host))

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not been found ended."""
        return self._process is not None

    def start(self, around: Mapping[str, str], *, now_s: float, crash: Path, forks: None = None) -> None:
        """Start the process, which begins to work a little later."""
        self.started_s, self.born_s, self.beat_s = now_s, now_s, None
        run, spec = self.run, self.spec
        process = self._process = Process(run.world, spec.name, self._host, spec.env.get(UNIT, ""))
        run.world.note(f"{spec.name} starts on {process.unit or self._host.name}")
        run.witness.starts(process, int(spec.env.get(UNIT_EPOCH, 0)), self._supervisor)
        process.at(run.world.rng.uniform(*START_S), lambda: self._begin(process))

    def _begin(self, process: Process) -> None:
        role = ROLES[self.spec.role](self.run, process, self.spec)
        process.every(TICK_S, role.turn)
        process.every(BEAT_S, lambda: self._beat(process))

    def _beat(self, process: Process) -> None:
        said_s, role = process.now_s(), self.spec.name
        self._supervisor.at(0.01, lambda: self.run.hosts[self._host.name].heard(role, said_s))

    def poll(self) -> int | None:
        """Exit code if the process has just been found ended, else None."""
        if self._process is None or self._process.code is None:
            return None
        code, self._process = self._process.code, None
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGKILL ends the process in a moment, SIGTERM once it is not stopped."""
        process, world = self._process, self.run.world
        if process is None:
            return
        if number == signal.SIGKILL:
            world.push(world.rng.uniform(*KILL_S), None, lambda: process.end(-number))
        else:
            process.at(world.rng.uniform(0.0, 1.0), lambda: _end(-number))

    def ask_for_stacks(self) -> None:
        """Do nothing: a simulated process has no stacks."""

    def new_lines(self) -> list[str]:
        """Lines of output, of which a simulated process has none."""
        return []

    def account(self, code: int, *, free_bytes: int) -> tuple[int, str]:
        """Exit code, and a reason for the log."""
        return code, "simulated"

    def write_crash(self, folder: Path, code: int, reason: str, now_unix_s: float) -> None:
        """Do nothing: nobody reads the file."""

    def _kill(self, *, with_host: bool) -> None:
        """End the process with its supervisor; an engine may outlive the latter until the next supervisor kills it."""
        process, rng = self._process, self.run.world.rng
        if process is None:
            return
        if process.unit and not with_host and rng.random() < ESCAPES_SHARE:
            self.run.world.push(rng.uniform(*ESCAPES_S), None, lambda: process.end(-signal.SIGKILL))
        else:
            process.end(-signal.SIGKILL, with_host=with_host)


class SimulatedNode(UnitNode):
    """Node of units that looks for processes in the simulated world."""

    def _on_unit(self, unit: str) -> dict[str, list[int]]:
        world, found = SimulatedChild.run.world, dict[str, list[int]]()
        for process in world.processes:
            if process.unit == unit:
                found.setdefault(process.name.split("/")[1], []).append(process.number)
        return found


def kill(run: "Run", number: int) -> None:
    """Kill a simulated process, in place of `os.kill` with SIGKILL."""
    for process in run.world.processes:
        if process.number == number:
            run.world.push(run.world.rng.uniform(*KILL_S), None, partial(process.end, -signal.SIGKILL))


class HostProcess:
    """The supervisor of one host, as `mrl.processes.supervisor` and `mrl.processes.join` run it."""

    def __init__(self, run: "Run", process: Process, specs: tuple[ProcessSpec, ...], *, is_first: bool) -> None:
        self._run, self.process = run, process
        host = process.host.name
        learners = frozenset(f"learner/{policy}" for policy in run.config.policies)
        self.lifecycle = Lifecycle(learners, stop_s=run.config.supervision.stop_s, started_s=process.now_s())
        attempt = run.folder.path / "logs"
        self._processes = HostProcesses(
            specs, table=run.config.supervision, is_sync=False, lifecycle=self.lifecycle, attempt=attempt,
            crash=run.folder.path / "crash", told=self,
        )  # fmt: skip
        units = units_of(run.config, "" if is_first else host, is_first=is_first)
        node = SimulatedNode(
            run.config, run.folder, units, self._processes, self.lifecycle, host=host, closing=ExitStack()
        )
        self._processes.every_turn(node.turn)
        process.every(TICK_S, self.turn)

    def turn(self) -> None:
        """Do one turn of the supervisor."""
        now_s = self.process.now_s()
        for link, on_tick in self._run.node_links[self.process]:
            link.turn()
            on_tick(now_s)
        self._hear_of_the_end(now_s)
        for part in self._processes.parts():
            part(now_s)
        self.lifecycle.tick(now_s)
        self._processes.signal_all(now_s)
        if self._processes.is_over:
            raise Ended(self.lifecycle.exit_code)

    def _hear_of_the_end(self, now_s: float) -> None:
        """Hear from the other hosts which learners are done."""
        for name, other in self._run.hosts.items():
            if other is not self and not self._run.network.is_cut((name, self.process.host.name)):
                for learner in sorted(other.lifecycle.done - self.lifecycle.done):
                    self.lifecycle.finished(learner, now_s)

    def heard(self, role: str, said_s: float) -> None:
        """Take a role's heartbeat."""
        self._processes.heard(role, said_s, self.process.now_s())

    def event(self, text: str, now_s: float) -> None:
        """Note an event of a role; tell the witness of a silent one."""
        self._run.world.note(text)
        if " sent no heartbeat for " in text:
            self._run.witness.is_silent(text.partition(" ")[0], self.process)

    def line(self, text: str) -> None:
        """Drop a line of a role's log."""


def node_link(run: "Run", *, identity: str, on_message: Any, on_tick: Any) -> "Link":
    """Open a link for the node that the current process makes, in place of `wiring.link`."""
    process = run.world.current
    assert process is not None
    link = open_link(run, process, "allocator", on_message, client=identity)
    run.node_links[process] = [(link, on_tick)]
    return link


def _end(code: int) -> None:
    raise Ended(code)


def new_host(run: "Run", name: str) -> Host:
    """Make a host that was just switched on."""
    return Host(name, offset_s=run.world.rng.uniform(0.0, 1e6))
