"""A process of agents: `python -m mrl.gateway.agent_process MODULE:FUNCTION TASK BYTES SECONDS`.

The process plays episodes until it is ended. BYTES limits its address space. An episode that keeps the processor for
SECONDS, without a pause for the others, is broken off.

The function is called once for each episode, `await function(client, row)`: `client` is an `openai.AsyncOpenAI` whose
requests go to the policy that plays, under the model's name "policy"; `row` is the task's row. The function returns the
reward. A function whose first argument is called `clients` plays with all policies at once, each in an episode of its
own from the same row: it gets {policy: client}, and returns {policy: reward}. An exception of a function fails its own
episodes. The gateway's address and the key come by environment variables.

`... --check MODULE:FUNCTION` prints "clients" for a function that plays with all policies, and an empty line for any
other; for a function that can be no agent, one line on standard error says why.
"""

import asyncio
import errno
import inspect
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import setproctitle

from mrl.gateway.agent_network import FENCED, KEY, PLAYER, URL
from mrl.gateway.session import OVER
from mrl.tasks.environments.contract import MEMORY, RAISED, TIMEOUT
from mrl.tasks.environments.opening import named_object
from mrl.tasks.environments.user_class import ClassMistake
from mrl.tasks.rewards import CodeLine, place_of

TAKERS, AT_ONCE = 16, 4096
"""Requests for an episode that one process has open, and episodes that it plays at once, both at most. The second has
to cover a synchronous run, which samples no turn before every episode has asked for one."""
KEPT_CONNECTIONS = 100
"""Connections that the client of the policy keeps for later requests, at most."""
WATCH_S = 0.5
"""Seconds between restarts of the timer that finds an episode which keeps the processor."""
PAUSE_S = 0.5
"""Seconds before the gateway is asked again after a request for an episode that gave none."""
REQUEST_S = 120.0
MAX_WORDS = 300
"""Characters of a reason that is told to the gateway, at most."""
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EADDRNOTAVAIL)
ALL = "clients"
"""Name of the first argument of a function that plays with all policies at once."""

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class HeldTooLong(BaseException):
    """Raised in an episode that keeps the processor; a BaseException, since agents catch any Exception."""


Agent = Callable[[Any, Mapping[str, Any]], Awaitable[Any]]


def named_agent(name: str) -> Agent:
    """Import the agent of a name "module:function". Raises ClassMistake."""
    module, _, attribute = name.partition(":")
    found = named_object(module, attribute)
    if not inspect.iscoroutinefunction(found):
        raise ClassMistake(f"{name} is not an async function; wanted `async def {attribute}(client, row)`")
    try:
        inspect.signature(found).bind(None, {})
    except TypeError as error:
        raise ClassMistake(f"{name} cannot be called with (client, row): {error}") from None
    agent: Agent = found
    return agent


def plays_with_all(agent: Agent) -> bool:
    """Whether a function plays with all policies at once."""
    return next(iter(inspect.signature(agent).parameters)) == ALL


class Player:
    """Takes episodes of one task from the gateway, and plays many at once."""

    def __init__(self, agent: Agent, task: str, client: "AsyncOpenAI") -> None:
        """`client` has the run's key. Episodes share its connections, since making a client takes 30 ms."""
        self._agent, self._task, self._client = agent, task, client
        self._url, self._key = str(client.base_url).rstrip("/"), client.api_key
        self._plays_with_all = plays_with_all(agent)
        self._has_shown = self._has_told_network = False
        self._episodes: set[asyncio.Future[None]] = set()

    async def play(self, http: aiohttp.ClientSession, *, takers: int = TAKERS) -> None:
        """Play without an end: `takers` requests for an episode are open at a time, and at most AT_ONCE are played."""
        asked: dict[str, Any] = {"task": self._task, "player": os.environ.get(PLAYER, "")}
        if self._plays_with_all:
            asked["models"] = [model.id async for model in self._client.models.list()]
        room = asyncio.Semaphore(AT_ONCE)
        try:
            await asyncio.gather(*(self._take(http, asked, room) for _ in range(takers)))
        finally:
            for episode in self._episodes:
                episode.cancel()

    async def _take(self, http: aiohttp.ClientSession, asked: Mapping[str, Any], room: asyncio.Semaphore) -> None:
        while True:
            await room.acquire()
            _, found = await self._post(http, "/sessions", asked)
            if "id" in found or "sessions" in found:
                episode = asyncio.ensure_future(self._episode(http, found.get("sessions", [found])))
                self._episodes.add(episode)
                episode.add_done_callback(self._episodes.discard)
                episode.add_done_callback(lambda _: room.release())
            else:
                room.release()
                await asyncio.sleep(PAUSE_S)

    async def _episode(self, http: aiohttp.ClientSession, sessions: Sequence[Mapping[str, Any]]) -> None:
        clients = {one["model"]: self._client.with_options(api_key=one["api_key"]) for one in sessions}
        row = sessions[0]["row"]
        try:
            if self._plays_with_all:
                rewards = _by_name(await self._agent(clients, row), list(clients))
            else:
                rewards = {name: float(await self._agent(client, row)) for name, client in clients.items()}
        except (Exception, HeldTooLong) as error:  # noqa: BLE001 - an agent's exception ends its own episodes
            await self._fail(http, sessions, self._told(error), kind=kind_of(error))
            return
        for one in sessions:
            reward = rewards[one["model"]]
            told = {"reward": reward if math.isfinite(reward) else None}
            status, refusal = await self._post(http, f"/sessions/{one['id']}/reward", told)
            if status >= 400 and refusal.get("error", {}).get("code") != OVER:
                await self._fail(http, [one], f"reward {reward} refused: {refusal}"[:MAX_WORDS])

    async def _fail(
        self, http: aiohttp.ClientSession, sessions: Sequence[Mapping[str, Any]], words: str, *, kind: str = RAISED
    ) -> None:
        told = {"reason": words, "kind": kind}
        await asyncio.gather(*(self._post(http, f"/sessions/{one['id']}/fail", told) for one in sessions))

    async def _post(
        self, http: aiohttp.ClientSession, path: str, body: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and JSON body of the response; 0 and {} where there is none."""
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            headers = {"Authorization": f"Bearer {self._key}"}
            async with http.post(self._url + path, json=body, headers=headers) as response:
                return response.status, await response.json()
        return 0, {}

    def _told(self, error: BaseException) -> str:
        """Describe an error in one line, with its line of the agent's code; print the traceback of the first error.
        Where the agent's own network caused the error, the key that gives the host's network follows."""
        if not self._has_shown:
            self._has_shown = True
            traceback.print_exception(error)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [CodeLine(one.filename, one.lineno or 0, one.name) for one in frames if one.filename != __file__]
        place = f" ({place_of(lines)})" * bool(lines)
        told = f"{type(error).__name__}: {error}{place}"[:MAX_WORDS]
        if not os.environ.get(FENCED) or not is_for_want_of_network(error):
            return told
        cure = f'agents can reach only the gateway; set tasks.{self._task}.agent_network = "host" to allow more'
        if not self._has_told_network:
            self._has_told_network = True
            print(f"{told}; {cure}", file=sys.stderr, flush=True)
        return f"{told}; {cure}"


def is_for_want_of_network(error: BaseException | None) -> bool:
    """Whether an address could not be reached, by this error or by an error that it was raised from."""
    while error is not None:
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in UNREACHABLE):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(map(is_for_want_of_network, error.exceptions))
        error = error.__cause__ or error.__context__
    return False


def kind_of(error: BaseException) -> str:
    """Return the key of `FAILURES` under which an exception ends an episode."""
    if isinstance(error, BaseExceptionGroup):
        return kind_of(error.exceptions[0])
    return MEMORY if isinstance(error, MemoryError) else TIMEOUT if isinstance(error, HeldTooLong) else RAISED


async def break_off_what_holds(cpu_s: float) -> None:
    """Watch without an end: raise HeldTooLong in an episode that keeps the processor from the others for `cpu_s`."""

    def hold(*_: object) -> None:
        raise HeldTooLong(f"the episode used more than {cpu_s:g} s of CPU time without yielding to other episodes")

    signal.signal(signal.SIGPROF, hold)
    while True:
        signal.setitimer(signal.ITIMER_PROF, cpu_s + WATCH_S, cpu_s)
        await asyncio.sleep(WATCH_S)


def _by_name(returned: object, names: Sequence[str]) -> dict[str, float]:
    """Check that an agent returned a reward for each policy, and return {policy: reward}. Raises TypeError."""
    if not isinstance(returned, Mapping) or set(returned) != set(names):
        raise TypeError(
            f"the agent returned {returned!r:.80}; wanted a dict with a reward for each of {', '.join(names)}"
        )
    return {name: float(reward) for name, reward in returned.items()}


def client_of(url: str, key: str) -> "AsyncOpenAI":
    """Make a client without a limit of time or of connections.

    A turn takes as long as the policy does, and a session's end ends its requests. Each request that waits for a turn
    holds a connection; with openai's own limit of 1000, further episodes could not ask, and would count as silent.
    """
    from openai import DEFAULT_CONNECTION_LIMITS, AsyncOpenAI, DefaultAsyncHttpxClient

    limits = type(DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
    return AsyncOpenAI(base_url=url, api_key=key, timeout=None, http_client=DefaultAsyncHttpxClient(limits=limits))


async def serve(agent: Agent, task: str, cpu_s: float) -> None:
    """Play episodes until this process is ended."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with (
        client_of(os.environ[URL], os.environ[KEY]) as client,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
    ):
        player = Player(agent, task, client)
        await asyncio.gather(player.play(http), break_off_what_holds(cpu_s))


def main(words: list[str]) -> int:
    """Play, or check a function. Return the exit code: 2 after one line that says why the function can be no agent."""
    setproctitle.setproctitle("mrl::agent")
    try:
        if words[0] == "--check":
            print(ALL if plays_with_all(named_agent(words[1])) else "")
            return 0
        name, task, memory_bytes, cpu_s = words
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
        asyncio.run(serve(named_agent(name), task, float(cpu_s)))
    except ClassMistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
