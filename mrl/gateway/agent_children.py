"""Processes of agents from outside: started, watched, started again."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.gateway.agent_network import BACKLOG, BASE_URL, KEY, URL, fenced, handed_over
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
    is_fenced: bool
    """Whether it is to have a network of its own."""
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    due_s: float = 0.0
    num_ends: int = 0
    """In a row, without a steady life between."""
    site: web.SockSite | None = None
    """Where the gateway listens in its network."""


class AgentChildren:
    """The processes of all tasks whose agents the run starts. They end with this process."""

    def __init__(
        self,
        tasks: Mapping[str, TaskTable],
        runner: web.AppRunner,
        *,
        url: str,
        key: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`runner` is the gateway, which listens at `url` and is made to listen in the networks of agents as well."""
        # Through no proxy: the gateway is of this run, and may listen at an address that nobody else reaches.
        others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        direct = ",".join(filter(None, (urlsplit(url).hostname, "127.0.0.1", others)))
        own = {URL: url, KEY: key, BASE_URL: url, "OPENAI_API_KEY": key, "NO_PROXY": direct, "no_proxy": direct}
        self._environment = os.environ | own
        self._runner, self._port, self._clock = runner, urlsplit(url).port or 80, clock
        self._told: set[str] = set()
        """Tasks of whose network something was said."""
        self._children = [
            _Child(task, table.dataset, table.is_fenced)
            for task, table in tasks.items()
            if table.source == "agent" and not table.is_outside
            for _ in range(table.agent_processes)
        ]

    @property
    def num_alive(self) -> int:
        """Processes that live."""
        return sum(child.process is not None for child in self._children)

    async def tend(self) -> None:
        """Start what is not there. Raises TaskError where agents end again and again."""
        now_s = self._clock()
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                if child.site is not None:
                    await child.site.stop()
                self._ended(child, code, now_s)
            if child.process is None and now_s >= child.due_s:
                child.started_s = now_s
                await self._start(child)

    def close(self) -> None:
        """Kill them."""
        for child in self._children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()
                child.process = None

    async def _start(self, child: _Child) -> None:
        argv = command(os.getpid(), (sys.executable, "-m", MODULE, child.name, child.task))
        if not child.is_fenced:
            child.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=self._environment)
            return
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                child.process = subprocess.Popen(fenced(argv, self._port), stdin=theirs.fileno(), env=self._environment)
            listening, reason = await asyncio.to_thread(handed_over, ours)
        if listening is not None:
            child.site = web.SockSite(self._runner, listening, backlog=BACKLOG)
            await child.site.start()
        if child.task not in self._told and (listening is not None or child.process.poll() is None):
            self._told.add(child.task)
            self._tell(child.task, reason)

    def _tell(self, task: str, reason: str) -> None:
        key = f"tasks.{task}.agent_network"
        if reason:
            words = "agents reach all that this host does, which has no network namespace to give"
            log.warning(words, task=task, why=reason, cure=f'{key} = "host", if that is as it should be')
        else:
            log.info("agents reach the gateway and nothing else", task=task, unless=f'{key} = "host"')

    def _ended(self, child: _Child, code: int, now_s: float) -> None:
        child.process = child.site = None
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
