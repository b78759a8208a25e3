"""Agents that are programs: real processes, one for each episode, in their network and within their limits."""

import asyncio
import json
import os
import sys
import time
from contextlib import asynccontextmanager

import psutil
import pytest
import structlog
from aiohttp import web

from mrl.config.load import validate
from mrl.config.rules.run_rules import check_rules
from mrl.config.task_tables import TaskTable
from mrl.errors import ConfigError, TaskError
from mrl.gateway.agent_network import unfenced_reason
from mrl.gateway.agent_programs import AgentPrograms
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.agent_trial import check_program
from mrl.gateway.routes import Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.tasks.environments.contract import DONE, EXITED, GIVEN_UP, MEMORY, TIMEOUT, PolicyTurn
from tests.gateway.test_agent_network import episode

PROGRAM = """
import json, os, socket, subprocess, sys, time, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request, timeout=60).read())

row = json.loads(os.environ["MRL_ROW"])
open(f"pid-{os.getpid()}", "w").close()
if row["does"] == "die early":
    print("no such luck", file=sys.stderr)
    sys.exit(3)
words = row["does"]
if row["does"] == "reach out":
    try:
        socket.create_connection((row["host"], row["port"]), timeout=5)
    except OSError as error:
        words = f"unreachable: {os.environ['MRL_MODEL']}"
talk = [{"role": "user", "content": words}]
said = post("/chat/completions", {"model": "policy", "messages": talk})["choices"][0]["message"]["content"]
if row["does"] == "want memory":
    bytearray(1 << 32)
while row["does"] == "compute":
    pass
if row["does"] == "hang":
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
if row["does"] == "kill itself":
    os.kill(os.getpid(), 9)
if row["does"] != "forget":
    post(f"/sessions/{os.environ['MRL_SESSION']}/reward", {"reward": float(said == "well")})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the program lies and runs."""
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_of(*words, **more):
    """A task whose agent is the program, or another command."""
    return TaskTable(source="agent", command=list(words or (sys.executable, "my_agent.py")), **more)


@asynccontextmanager
async def playing(idle_s=60.0, command=(), **more):
    """A book whose episodes are played by programs."""
    registry = SessionRegistry(idle_s=idle_s)
    gateway = Gateway(registry, policies=["qwen"], key="mrl-agents", seat_key="mrl-seats", max_body_bytes=1 << 20)
    runner = gateway.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    tasks = {"sums": table_of(*command, **more)}
    programs = AgentPrograms(tasks, AgentStarts(runner, url), registry, key_of=gateway.key_of)
    try:
        programs.tend()
        yield registry, programs
    finally:
        await programs.close()
        await runner.cleanup()
    assert programs.num_alive == 0


@pytest.mark.parametrize(
    ("does", "table", "reason", "words"),
    [
        ("play", {}, DONE, ""),
        ("die early", {}, EXITED, "the agent program exited with code 3 and gave no reward: no such luck"),
        ("forget", {}, EXITED, "the agent program exited with code 0 and gave no reward"),
        ("kill itself", {}, EXITED, "the agent program was killed by signal 9 and gave no reward"),
        ("want memory", {"agent_memory_mib": 2048}, MEMORY, "code 1 and gave no reward: MemoryError"),
        ("compute", {"episode_cpu_s": 1.0}, TIMEOUT, "the agent program used more than 1 s of CPU time"),
    ],
)
def test_each_end_of_a_program_is_told_and_counted(folder, does, table, reason, words):
    """And the next episode has its program."""

    async def whole():
        async with playing(**table) as (registry, _):
            _, last = await episode(registry, does=does)
            assert (last.reason, last.has_failed) == (reason, reason != DONE)
            assert words in last.words
            _, last = await episode(registry, does="play")
            assert (last.reason, last.reward) == (DONE, 1.0)
            return registry.counts[f"ends/{reason}"]

    with structlog.testing.capture_logs() as logs:
        assert asyncio.run(whole()) == (2 if reason == DONE else 1)
    told = [one["why"] for one in logs if one["log_level"] == "warning" and "gave no reward" in one["event"]]
    assert len(told) == (reason != DONE)


@pytest.mark.skipif(bool(unfenced_reason()), reason=f"no namespaces here: {unfenced_reason()}")
@pytest.mark.parametrize(("network", "said"), [("gateway", "unreachable: qwen"), ("host", "reach out")])
def test_a_program_has_the_network_of_its_task(folder, network, said):
    """The gateway alone, or all that the host has."""

    async def whole():
        other = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        async with playing(agent_network=network) as (registry, _):
            first, last = await episode(registry, does="reach out", host="127.0.0.1", port=port)
        other.close()
        return first.messages[0].content, last.reward

    assert asyncio.run(whole()) == (said, 1.0)


def test_a_program_whose_episode_is_given_up_is_killed_with_its_children(folder):
    """At once; no more of them play at a time than the task says."""

    async def whole():
        async with playing(agent_processes=2) as (registry, programs):
            sessions = [registry.offer("qwen", "sums", {"seed": 1, "does": "hang"}) for _ in range(3)]
            opened = [session.opened() for session in sessions]
            await asyncio.wait_for(asyncio.wait(opened, return_when=asyncio.FIRST_COMPLETED), 60)
            await asyncio.wait_for(asyncio.gather(*opened[:2]), 60)
            assert (programs.num_alive, registry.num_offered) == (2, 1)
            sessions[0].step(PolicyTurn("well"))
            pids = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
            deadline_s = time.monotonic() + 30
            while not (children := [child for pid in pids for child in psutil.Process(pid).children()]):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            registry.leave(sessions[0])
            await asyncio.wait_for(opened[2], 60)  # its place is taken by the next one
            deadline_s = time.monotonic() + 60
            while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            return sessions[0].ending

    assert asyncio.run(whole()) == GIVEN_UP


def test_a_row_that_no_environment_holds_fails_its_episode_alone(folder):
    """In words."""

    async def whole():
        async with playing() as (registry, _):
            first, _ = await episode(registry, does="play", text="x" * (1 << 18))
            assert (first.reason, first.words) == (
                EXITED,
                "the agent program could not be started: Argument list too long",
            )
            _, last = await episode(registry, does="play")
            return last.reward

    assert asyncio.run(whole()) == 1.0


@pytest.mark.parametrize(
    ("words", "program", "refusal"),
    [
        (("no-such-program-here",), "", "program not found"),
        ((sys.executable, "not_there.py"), "", "exits before its first request: .*can't open file"),
        ((sys.executable, "my_agent.py"), "raise KeyError(1)\n", "exits before its first request: KeyError: 1"),
        ((sys.executable, "my_agent.py"), "", "exits before its first request: exit code 0"),
        ((sys.executable, "my_agent.py"), PROGRAM, ""),
    ],
)
def test_the_check_starts_the_program_once(folder, words, program, refusal):
    """With a row of the task; what can be no agent is told in a line with the key."""
    (folder / "my_agent.py").write_text(program)
    (folder / "rows.jsonl").write_text(json.dumps({"does": "play"}) + "\n")
    table = table_of(*words, options={"data": "rows.jsonl"})
    if not refusal:
        check_program("sums", table, seed=1)
        return
    with pytest.raises(TaskError, match=refusal) as found:
        check_program("sums", table, seed=1)
    assert "tasks.sums.command" in str(found.value)
    assert "\n" not in str(found.value).strip()
    assert not [one for one in psutil.Process(os.getpid()).children() if "my_agent.py" in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    ("table", "run", "refusal"),
    [
        ({"source": "agent", "command": ["a"]}, {}, ""),
        ({"source": "agent", "command": ["a"], "dataset": "m:f"}, {}, "dataset = 'm:f'"),
        ({"source": "environment", "command": ["a"]}, {}, "source = 'environment'"),
        ({"source": "agent", "dataset": "command"}, {}, "no command"),
        ({"source": "agent", "command": ["a"]}, {"sync": True}, "programs run only a few at a time"),
        ({"source": "agent"}, {}, "tasks.sums.dataset: missing"),
        ({"source": "agent", "command": []}, {}, "tasks.sums.dataset: missing"),
        ({"source": "agent", "command": "a"}, {}, "tasks.sums.command"),
    ],
)
def test_a_command_stands_for_a_data_set_of_agents_alone(table, run, refusal):
    """Everything else is one line with the key."""
    tables = {
        "run": {"name": "r", "steps": 1, **run},
        "tasks": {"sums": table},
        "policies": {name: {"model": "nowhere"} for name in ("qwen", "llama")},
    }
    if not refusal:
        check_rules(validate(tables, where="test"), where="test")
        return
    with pytest.raises(ConfigError, match=refusal):
        check_rules(validate(tables, where="test"), where="test")
