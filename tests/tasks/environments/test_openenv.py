"""OpenEnv's messages against a server that speaks them; against the real package in an environment of its own."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from mrl.tasks.environments.contract import PolicyTurn, ToolCall
from mrl.tasks.environments.environment_pool import EnvironmentPool

LONG_S = 60.0
PACKAGE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrl" / "openenv"
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
SERVER = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    message: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    def reset(self, seed=None, episode_id=None, **given):
        self.digit = str(seed % 10)
        return Heard(message="Guess a digit.")
    def step(self, action, timeout_s=None, **given):
        if action.message == "boom":
            raise ValueError("boom")
        is_right = action.message == self.digit
        return Heard(message="right" if is_right else "wrong", reward=1.0 if is_right else -0.25, done=is_right)

class Sums(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    def __init__(self):
        server = FastMCP("sums")
        @server.tool()
        def add(a: int, b: int) -> int:
            '''Adds.'''
            return a + b
        super().__init__(server)
    def reset(self, seed=None, episode_id=None, **given):
        return Observation(metadata={"n": seed})
    def _step_impl(self, action, timeout_s=None, **given):
        return Observation()

kind, port = sys.argv[1], int(sys.argv[2])
made = (Game, Said, Heard) if kind == "game" else (Sums, CallToolAction, CallToolObservation)
uvicorn.run(create_fastapi_app(*made, max_concurrent_envs=64), host="127.0.0.1", port=port, log_level="warning")
"""


def answer(message: dict) -> dict:
    """What the server says: a counting game, or one tool."""
    data = message.get("data", {})
    match message["type"], data.get("type"):
        case "reset", _:
            return observation({"message": f"seed {data['seed']} {data.get('word', '')}"})
        case "step", "list_tools" if answer.has_tools:
            return observation({"tools": TOOLS})
        case "step", "list_tools":
            return {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no such action"}}
        case "step", "call_tool":
            if data["arguments"].get("a") == 0:
                return observation({"tool_name": "add", "error": {"error_type": "x", "message": "no zero"}})
            return observation({"tool_name": "add", "result": {"data": 5}}, reward=0.5)
        case "step", _:
            return says(data["message"])
    raise AssertionError(message)


def says(text: str) -> dict:
    """The answer to a turn of text."""
    match text:
        case "end":
            return observation({"message": "over"}, reward=1.0, done=True)
        case "nan":
            return observation({"message": "x"}, reward=float("nan"))
        case "long":
            return observation({"message": "x" * 10_000_000})
        case "odd":
            return {"type": "surprise"}
        case "boom":
            return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}
    return observation({"message": f"heard {text}"}, reward=-0.25)


def observation(seen: dict, **more) -> dict:
    """As OpenEnv wraps it."""
    return {"type": "observation", "data": {"observation": seen, "reward": None, "done": False} | more}


async def serve(request: web.Request) -> web.WebSocketResponse:
    """One connection."""
    connection = web.WebSocketResponse(max_msg_size=0, heartbeat=answer.heartbeat_s)
    await connection.prepare(request)
    async for message in connection:
        if message.type is WSMsgType.TEXT and (asked := json.loads(message.data))["type"] != "close":
            await connection.send_str(json.dumps(answer(asked)))
    return connection


@pytest.fixture
def server():
    """The URL of a server in a thread."""
    answer.has_tools, answer.heartbeat_s = False, None
    loop, listening = asyncio.new_event_loop(), socket.create_server(("127.0.0.1", 0))
    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.SockSite(runner, listening).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"ws://127.0.0.1:{listening.getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG_S)
    loop.run_until_complete(runner.cleanup())
    loop.close()


@pytest.fixture
def pool(server):
    """Episodes on that server."""
    with closing(EnvironmentPool(server, processes=1, wall_s=60.0, cpu_s=60.0)) as made:
        yield made


def test_a_text_environment(pool):
    """Prompt, turns, and the sum of the rewards; a row's other columns are options of the reset."""
    session = pool.open(7, {"prompt": "Play.", "word": "sun"})
    assert session.first.result(LONG_S).messages[0].content == "Play.\nseed 7 sun"
    assert session.step(PolicyTurn("a")).result(LONG_S).messages[0].content == "heard a"
    last = session.step(PolicyTurn("end")).result(LONG_S)
    assert (last.done, last.reward, last.reason) == (True, 0.75, "done")


def test_a_turn_of_the_policy_may_take_longer_than_the_server_waits_for_a_pong(pool):
    """Pings are answered meanwhile, although nothing is asked of the server."""
    answer.heartbeat_s = 0.4
    session = pool.open(7, {})
    session.first.result(LONG_S)
    time.sleep(1.5)
    assert session.step(PolicyTurn("end")).result(LONG_S).reason == "done"


@pytest.mark.parametrize(("query", "says"), [("", False), ("?deterministic=yes", True)])
def test_only_its_url_says_that_a_server_says_the_same_again(server, query, says):
    """It is not among what servers tell."""
    with closing(EnvironmentPool(f"{server}/ws{query}", processes=1, wall_s=60.0, cpu_s=60.0)) as pool:
        first = pool.open(7, {}).first.result(LONG_S)
    assert (first.is_deterministic, first.messages[0].content[:6]) == (says, "seed 7")


def test_tools_of_the_server_are_those_of_the_policy(pool):
    """Results and errors are the tools' answers; an answer without a call ends the episode."""
    answer.has_tools = True
    session = pool.open(1, {})
    assert [tool.name for tool in session.first.result(LONG_S).tools] == ["add"]
    calls = ToolCall.of("add", {"a": 2, "b": 3}), ToolCall.of("add", {"a": 0})
    turn = session.step(PolicyTurn("", calls)).result(LONG_S)
    assert [message.content for message in turn.messages] == ["5", "error: no zero"]
    assert turn.tool_errors == 1
    assert session.step(PolicyTurn("5")).result(LONG_S).reward == 0.5


@pytest.mark.parametrize(
    ("text", "reason"), [("nan", "not_finite"), ("long", "too_long"), ("odd", "wrong_type"), ("boom", "raised")]
)
def test_a_server_that_lies_costs_its_episode(pool, text, reason):
    """Others go on."""
    good, bad = pool.open(1, {}), pool.open(2, {})
    assert not good.first.result(LONG_S).done
    assert not bad.first.result(LONG_S).done
    assert bad.step(PolicyTurn(text)).result(LONG_S).reason == reason
    assert good.step(PolicyTurn("a")).result(LONG_S).messages[0].content == "heard a"


def test_nobody_there_ends_the_episode():
    """With the reason that the connection gives."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with closing(EnvironmentPool(f"ws://127.0.0.1:{port}", processes=1, wall_s=60.0, cpu_s=60.0)) as pool:
        turn = pool.open(1, {}).first.result(LONG_S)
    assert turn.reason == "raised"
    assert "Cannot connect" in turn.words


@pytest.mark.engines
@pytest.mark.skipif(not (PACKAGE / "made").exists(), reason="no openenv: bash tools/harness_env.sh openenv")
@pytest.mark.parametrize("kind", ["game", "tools"])
def test_the_real_package(tmp_path, kind):
    """A game, and tools by MCP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    argv = [str(PACKAGE / "bin" / "python"), str(tmp_path / "server.py"), kind, str(port)]
    with subprocess.Popen(argv) as process:
        try:
            wait_for(port)
            with closing(EnvironmentPool(f"ws://127.0.0.1:{port}", processes=1, wall_s=60.0, cpu_s=60.0)) as pool:
                session = pool.open(7, {"prompt": "Play."})
                first = session.first.result(LONG_S)
                assert first.messages[0].content.startswith("Play."), first
                if kind == "game":
                    assert session.step(PolicyTurn("3")).result(LONG_S).messages[0].content == "wrong"
                    assert session.step(PolicyTurn("7")).result(LONG_S).reward == 0.75
                else:
                    assert [tool.name for tool in first.tools] == ["add"]
                    call = ToolCall.of("add", {"a": 2, "b": 3})
                    assert session.step(PolicyTurn("", (call,))).result(LONG_S).messages[0].content == "5"
        finally:
            process.kill()


def wait_for(port: int) -> None:
    """Until a server listens."""
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise TimeoutError(port)
