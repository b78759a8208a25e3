#!/usr/bin/env python3
"""The cost of an agent, for those who write one, beside an environment with the same words; the gateway's own delay.

Episodes go the way of a run, as those of `bench_episodes.py`: the embedded engine as a worker wraps it, environment
processes, and for the agent a gateway and a process of agents with the package openai, in processes of their own. CPU
seconds are of all these processes. Then the answer of a policy that takes no time is asked for by a lone client and by
64 at once: through a gateway and a seat, and from a bare server of aiohttp that answers at once.

    .venv/bin/python tools/bench_gateway.py [--rounds N] [--groups N] [--calls N]

Prints a table; the last line is JSON. Ends with 1 when the gateway adds more than 3 ms to the answer of a lone client.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from bench_episodes import GROUP_SIZE, TURNS, Played, config_of, make_policy, measure
from bench_row import Row, end, print_rows

from mrl.config.schema import GatewayTable
from mrl.gateway.agent_children import AgentChildren
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.routes import Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.processes.gateway import kept_key, listen
from mrl.tasks.environments.contract import PolicyTurn
from mrl.tasks.environments.gateway_location import AGENT_KEY, ENDPOINT, SEAT_KEY, GatewayLocation
from mrl.tasks.environments.opening import open_environment
from mrl.transport.endpoints import publish_endpoint, read_endpoint

AGENT, ENVIRONMENT = "agent", "environment"
OF_AGENT: dict[str, Any] = {"source": "agent", "dataset": "paced_environment:paced_agent"}
CLIENTS = 64
BARE = "bare"
START_S = 60.0
MOST_ADDED_MS = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=32, help=f"start states at once, of {GROUP_SIZE} episodes each")
    parser.add_argument("--calls", type=int, default=500, help="answers asked for, of each server")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without-agents", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ |= {"PYTHONPATH": here, "MRL_MODULES": here}
    if args.serve:
        asyncio.run(serve(args.serve, has_agents=not args.without_agents))
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [*throughput(Path(scratch) / "a", args.rounds, args.groups), *latency(Path(scratch) / "b", args.calls)]
    print_rows(rows)
    return end("gateway", rows)


async def serve(folder: Path, *, has_agents: bool) -> None:
    """Run a gateway as in a run, with a bare server beside it, until the standard input ends."""
    registry = SessionRegistry(idle_s=60.0)
    (folder / "keys").mkdir(exist_ok=True)
    key, seat_key = (kept_key(folder / "keys" / name) for name in (AGENT_KEY, SEAT_KEY))
    gateway = Gateway(registry, policies=["qwen"], key=key, seat_key=seat_key, max_body_bytes=1 << 20)
    runner = gateway.runner()
    await runner.setup()
    url = (await listen(runner, GatewayTable(), folder / "endpoints")).replace("tcp://", "http://") + "/v1"
    tasks = config_of(folder, 0.0, **OF_AGENT).tasks if has_agents else {}
    bare = await bare_server(folder)
    children = AgentChildren(tasks, AgentStarts(runner, url), registry, key=key)
    await children.tend()
    await asyncio.to_thread(sys.stdin.read)
    children.close()
    await runner.cleanup()
    await bare.cleanup()


async def bare_server(folder: Path) -> web.AppRunner:
    """Start a server that answers at once, in the process of the gateway."""

    async def at_once(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "one two three"}}]})

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", at_once)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    publish_endpoint(folder / "endpoints", BARE, f"tcp://127.0.0.1:{runner.addresses[0][1]}")
    return runner


def url_of(folder: Path, name: str) -> str:
    """URL of a published server, up to /v1."""
    return str(read_endpoint(folder / "endpoints", name)).replace("tcp://", "http://") + "/v1"


def gateway_process(folder: Path, closing: ExitStack, *words: str) -> None:
    """Start a gateway process, and wait until it listens."""
    folder.mkdir(exist_ok=True)
    argv = [sys.executable, __file__, "--serve", str(folder), *words]
    process = closing.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE))
    assert process.stdin is not None
    closing.callback(process.stdin.close)
    deadline_s = time.monotonic() + START_S
    while read_endpoint(folder / "endpoints", BARE) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("the gateway does not start")
        time.sleep(0.05)


def throughput(folder: Path, rounds: int, groups: int) -> list[Row]:
    """Rows of episodes per second and of CPU per episode, by environment and by agent."""
    folder.mkdir()
    make_policy(folder)
    with ExitStack() as closing:
        gateway_process(folder, closing)
        ways = {ENVIRONMENT: Played(folder, 0.0), AGENT: Played(folder, 0.0, **OF_AGENT)}
        for way in ways.values():
            closing.callback(way.close)
        figures = measure(ways, rounds=rounds, groups=groups)
    plain, agent = figures[ENVIRONMENT], figures[AGENT]  # of an episode
    turn_ms = 1000 * (agent.cpu_s - plain.cpu_s) / TURNS
    return [
        Row(f"{ENVIRONMENT}: a second", 1 / plain.wall_s, "1/s"),
        Row(f"{AGENT}: a second", 1 / agent.wall_s, "1/s", ENVIRONMENT, plain.wall_s / agent.wall_s),
        Row(f"{ENVIRONMENT}: CPU", 1000 * plain.cpu_s, "ms"),
        Row(f"{AGENT}: CPU", 1000 * agent.cpu_s, "ms", ENVIRONMENT, agent.cpu_s / plain.cpu_s),
        Row(f"{AGENT}: CPU of a turn beyond the environment's", turn_ms, "ms"),
    ]


def latency(folder: Path, calls: int) -> list[Row]:
    """Rows of the median milliseconds to an answer that takes the policy no time."""
    with ExitStack() as closing:
        gateway_process(folder, closing, "--without-agents")
        key = (folder / "keys" / AGENT_KEY).read_text().strip()
        stopping = threading.Event()
        seats = [threading.Thread(target=answer, args=(folder, stopping), daemon=True) for _ in range(CLIENTS)]
        for seat in seats:
            seat.start()
        closing.callback(stopping.set)
        found = asyncio.run(_latency(url_of(folder, ENDPOINT), url_of(folder, BARE), key, calls))
    rows = []
    for clients in (1, CLIENTS):
        bare, through = found["bare", clients], found["gateway", clients]
        required = f"<={(bare + MOST_ADDED_MS) / bare:.3f}" if clients == 1 else None
        rows.append(Row(f"bare server, {clients} at once: an answer", bare, "ms"))
        rows.append(
            Row(f"gateway, {clients} at once: an answer", through, "ms", "bare server", through / bare, required)
        )
    return rows


def answer(folder: Path, stopping: threading.Event) -> None:
    """Open one seat after another, and answer at once as their policy."""
    while not stopping.is_set():
        seat = open_environment(GatewayLocation(folder, "qwen").name("paced"))()
        with suppress(Exception):  # the gateway ends before its seats
            turn = seat.reset(0, {})
            while not turn.done:
                turn = seat.step(PolicyTurn("one two three"))
        with suppress(Exception):
            seat.close()


async def _latency(url: str, bare: str, key: str, calls: int) -> dict[tuple[str, int], float]:
    found = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for clients in (1, CLIENTS):
            each = max(1, calls // clients)
            for name, ask in (("bare", _Asking(http, bare, "")), ("gateway", _Asking(http, url, key))):
                times = [one for part in await asyncio.gather(*(ask(each) for _ in range(clients))) for one in part]
                found[name, clients] = 1000 * statistics.median(times)
    return found


class _Asking:
    """A client that asks turn after turn of one conversation, which begins anew before it is long."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self._http, self._url, self._key = http, url, key

    async def __call__(self, calls: int) -> list[float]:
        """Ask `calls` times; return the seconds of each answer."""
        times: list[float] = []
        while len(times) < calls:
            session = await self._post("/sessions", self._key, {}) if self._key else {"api_key": "", "id": ""}
            talk: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
            for _ in range(min(8, calls - len(times))):
                begin_s = time.perf_counter()
                said = await self._post("/chat/completions", session["api_key"], {"model": "policy", "messages": talk})
                times.append(time.perf_counter() - begin_s)
                talk += [said["choices"][0]["message"], {"role": "user", "content": "more"}]
            if self._key:
                await self._post(f"/sessions/{session['id']}/reward", self._key, {"reward": 1.0})
        return times

    async def _post(self, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as found:
            answer: dict[str, Any] = await found.json()
            return answer


if __name__ == "__main__":
    sys.exit(main())
