"""Supervision of the processes that play agent functions: they are started, watched and started again."""

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.gateway.agent_network import KEY, PLAYER, URL
from mrl.gateway.agent_start import AgentStarts, Started
from mrl.gateway.session_registry import SessionRegistry

MODULE = "mrl.gateway.agent_process"
STEADY_S = 30.0
"""Seconds of life after which the end of a process counts as the first of its ends in a row."""
MAX_ENDS_IN_A_ROW = 5
"""Ends of a process, without a life of STEADY_S between them, that end the run."""
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
"""Seconds before a process is started again: after its first end, doubled with each further end, and at most."""
MIB = 1024**2

log = structlog.get_logger()


@dataclass(slots=True)
class _Child:
    task: str
    name: str
    limits: tuple[str, str]
    """Address space in bytes, and seconds of processor time that an episode may take without a pause, both as text."""
    is_fenced: bool
    """Whether the process is to have a network namespace of its own."""
    started: Started | None = None
    player: str = ""
    """Name under which the process takes episodes from the gateway; new at every start."""
    started_s: float = 0.0
    due_s: float = 0.0
    """Clock time from which the process may be started again."""
    num_ends: int = 0
    """Ends in a row, without a life of STEADY_S between them."""


def _limits_of(table: TaskTable) -> tuple[str, str]:
    return str(table.agent_memory_mib * MIB), str(table.episode_cpu_s)


class AgentChildren:
    """The processes of all tasks whose agent is a function. They end with this process."""

    def __init__(
        self,
        tasks: Mapping[str, TaskTable],
        starts: AgentStarts,
        registry: SessionRegistry,
        *,
        key: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` is the run's key, which agents show to the gateway."""
        self._starts, self._registry, self._clock = starts, registry, clock
        self._environment = starts.environment(key) | {URL: starts.url, KEY: key}
        self._children = [
            _Child(task, table.dataset, _limits_of(table), table.is_fenced)
            for task, table in tasks.items()
            if table.is_function
            for _ in range(table.agent_processes)
        ]

    @property
    def num_alive(self) -> int:
        """Number of processes that are alive."""
        return sum(child.started is not None for child in self._children)

    async def tend(self) -> None:
        """Note processes that ended, and start those due. Raises TaskError where an agent ends again and again."""
        now_s = self._clock()
        for child in self._children:
            if child.started is not None and (code := child.started.process.poll()) is not None:
                await child.started.end()
                self._ended(child, code, now_s)
            if child.started is None and now_s >= child.due_s:
                child.started_s = now_s
                await self._start(child)

    def close(self) -> None:
        """Kill all processes."""
        for child in self._children:
            if child.started is not None:
                child.started.process.kill()
                child.started.process.wait()
                child.started = None

    async def _start(self, child: _Child) -> None:
        argv = (sys.executable, "-m", MODULE, child.name, child.task, *child.limits)
        child.player = secrets.token_hex(8)
        environment = self._environment | {PLAYER: child.player}
        child.started = await self._starts.start(child.task, argv, environment, is_fenced=child.is_fenced)

    def _ended(self, child: _Child, code: int, now_s: float) -> None:
        child.started = None
        num_lost = self._registry.lose(child.player)
        child.num_ends = 1 if now_s - child.started_s > STEADY_S else child.num_ends + 1
        if child.num_ends >= MAX_ENDS_IN_A_ROW:
            raise TaskError(
                f"the agent {child.name} exited {child.num_ends} times in a row",
                where=f"tasks.{child.task}.dataset",
                got=f"exit code {code}",
                cure="read the agent's output above, in the gateway's log",
            )
        child.due_s = now_s + min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (child.num_ends - 1))
        told = {"task": child.task, "agent": child.name, "code": code, "episodes_given_up": num_lost}
        log.warning("agent process exited; restarting it", **told)
