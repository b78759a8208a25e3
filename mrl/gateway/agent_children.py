"""Processes of agents from outside: started, watched, started again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.gateway.agent_process import KEY, URL
from mrl.parent_death import command

MODULE = "mrl.gateway.agent_process"
STEADY_S = 30.0
"""A process that lived for this long has begun."""
MAX_ENDS_IN_A_ROW = 5
PAUSE_S, MAX_PAUSE_S = 0.5, 10.0

log = structlog.get_logger()


@dataclass(slots=True)
class _Child:
    task: str
    name: str
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    due_s: float = 0.0
    num_ends: int = 0
    """In a row, without a steady life between."""


class AgentChildren:
    """The processes of all tasks whose agents the run starts. They end with this process."""

    def __init__(
        self, tasks: Mapping[str, TaskTable], *, url: str, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environment = os.environ | {URL: url, KEY: key, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        self._clock = clock
        self._children = [
            _Child(task, table.dataset)
            for task, table in tasks.items()
            if table.source == "agent" and not table.is_outside
            for _ in range(table.agent_processes)
        ]

    @property
    def num_alive(self) -> int:
        """Processes that live."""
        return sum(child.process is not None for child in self._children)

    def tend(self) -> None:
        """Start what is not there. Raises TaskError where agents end again and again."""
        now_s = self._clock()
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, code, now_s)
            if child.process is None and now_s >= child.due_s:
                argv = (sys.executable, "-m", MODULE, child.name, child.task)
                child.process = subprocess.Popen(
                    command(os.getpid(), argv), stdin=subprocess.DEVNULL, env=self._environment
                )
                child.started_s = now_s

    def close(self) -> None:
        """Kill them."""
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                child.process = None

    def _ended(self, child: _Child, code: int, now_s: float) -> None:
        child.process = None
        child.num_ends = 1 if now_s - child.started_s > STEADY_S else child.num_ends + 1
        if child.num_ends >= MAX_ENDS_IN_A_ROW:
            raise TaskError(
                f"the agent {child.name} ended {child.num_ends} times in a row",
                where=f"tasks.{child.task}.dataset",
                got=f"exit code {code}",
                cure="what it said stands above in the log of the gateway",
            )
        child.due_s = now_s + min(MAX_PAUSE_S, PAUSE_S * 2.0 ** (child.num_ends - 1))
        log.warning("an agent's process ended, and is started again", task=child.task, agent=child.name, code=code)
