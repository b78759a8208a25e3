"""Start of agents' processes, each in a network of its own, in which the gateway is made to listen."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from mrl.gateway.agent_network import BACKLOG, BASE_URL, fenced, handed_over
from mrl.parent_death import command

API_KEY = "OPENAI_API_KEY"
"""Environment variable in which OpenAI's own clients look for a key."""

log = structlog.get_logger()


@dataclass(slots=True)
class Started:
    """A started process, and the site at which the gateway listens in its network; None for the host's network."""

    process: "subprocess.Popen[bytes]"
    site: web.SockSite | None = None

    async def end(self) -> None:
        """Stop listening in the network of a process that has ended."""
        if self.site is not None:
            await self.site.stop()
            self.site = None


class AgentStarts:
    """Starts processes that ask the gateway at one address; they end with this process."""

    def __init__(self, runner: web.AppRunner, url: str) -> None:
        """`runner` is the gateway, which listens at `url` and is made to listen in the networks of agents, too."""
        self._runner, self.url, self._port = runner, url, urlsplit(url).port or 80
        self._told: set[str] = set()
        """Tasks whose network was logged."""

    def environment(self, key: str) -> dict[str, str]:
        """Environment variables of a process: those of this process, and the gateway's address and `key`."""
        # Without a proxy: the gateway belongs to this run, and may listen at an address that no proxy reaches.
        others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        direct = ",".join(filter(None, (urlsplit(self.url).hostname, "127.0.0.1", others)))
        return {**os.environ, BASE_URL: self.url, API_KEY: key, "NO_PROXY": direct, "no_proxy": direct}

    async def start(
        self, task: str, argv: Sequence[str], environment: Mapping[str, str], *, is_fenced: bool, **how: Any
    ) -> Started:
        """Start a process of this task; `is_fenced`: in a network of its own, if the host gives one. Raises OSError."""
        whole = command(os.getpid(), tuple(argv))
        if not is_fenced:
            return Started(subprocess.Popen(whole, stdin=subprocess.DEVNULL, env=environment, **how))
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(fenced(whole, self._port), stdin=theirs.fileno(), env=environment, **how)
            listening, reason = await asyncio.to_thread(handed_over, ours)
        started = Started(process)
        if listening is not None:
            started.site = web.SockSite(self._runner, listening, backlog=BACKLOG)
            await started.site.start()
        if task not in self._told and (listening is not None or process.poll() is None):
            self._told.add(task)
            _tell(task, reason)
        return started


def _tell(task: str, reason: str) -> None:
    key = f"tasks.{task}.agent_network"
    if reason:
        words = "agents can reach all that this host reaches: no network namespace available"
        log.warning(words, task=task, why=reason, cure=f'set {key} = "host" if this is intended')
    else:
        log.info("agents can reach only the gateway", task=task, unless=f'{key} = "host"')
