"""What agents that a run starts reach: the gateway alone, or all that the host does."""

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest
import structlog
from aiohttp import web

from mrl.config.task_tables import TaskTable
from mrl.gateway import agent_network, agent_start
from mrl.gateway.agent_children import AgentChildren
from mrl.gateway.agent_network import described_network, fenced, unfenced_reason
from mrl.gateway.agent_process import is_for_want_of_network
from mrl.gateway.agent_start import AgentStarts
from mrl.gateway.routes import Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.tasks.environments.contract import DONE, GIVEN_UP, RAISED, PolicyTurn

KEY = "mrl-agents"
PR_SET_DUMPABLE = 4
REFUSING = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
"""A shell in a namespace of users, of which the kernel then allows no namespace of a network."""
needs_namespaces = pytest.mark.skipif(bool(unfenced_reason()), reason=f"no namespaces here: {unfenced_reason()}")
AGENT = """
import asyncio, os, urllib.request

async def play(client, row):
    talk = [{"role": "user", "content": "go"}]
    if row["from"] == "elsewhere":
        where = row["place"]
        talk[0]["content"] = await asyncio.to_thread(lambda: urllib.request.urlopen(where, timeout=30).read().decode())
    if row["from"] == "variables":
        from openai import AsyncOpenAI
        async with AsyncOpenAI(api_key=client.api_key) as own:
            answer = await own.chat.completions.create(model="policy", messages=talk)
    else:
        answer = await client.chat.completions.create(model="policy", messages=talk)
    return float(answer.choices[0].message.content == "well")
"""


@asynccontextmanager
async def playing(folder, host="127.0.0.1", agent=AGENT, **table):
    """A book whose episodes are played by a process of agents."""
    (folder / "my_agents.py").write_text(agent)
    registry = SessionRegistry(idle_s=60.0)
    gateway = Gateway(registry, policies=["qwen"], key=KEY, seat_key="mrl-seats", max_body_bytes=1 << 20)
    runner = gateway.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://{host}:{runner.addresses[0][1]}/v1"
    tasks = {"sums": TaskTable(source="agent", dataset="my_agents:play", **table)}
    children = AgentChildren(tasks, AgentStarts(runner, url), registry, key=KEY)
    try:
        await children.tend()
        yield registry, children
    finally:
        children.close()
        await runner.cleanup()


async def episode(registry, **row):
    """What its agent says first, and its end."""
    session = registry.offer("qwen", "sums", {"seed": 1, **row})
    first = await asyncio.wait_for(session.opened(), 60)
    last = first if first.done else await asyncio.wait_for(session.step(PolicyTurn("well")), 60)
    registry.leave(session)
    return first, last


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An HTTP server of this host, which is not the gateway."""
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))
    served = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = served.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nfound")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.getsockname()[1]}/"
    served.shutdown(socket.SHUT_RDWR)
    served.close()
    thread.join()


@pytest.mark.parametrize("network", ["gateway", "host"])
def test_an_agent_asks_the_gateway_through_no_proxy(tmp_path, place, monkeypatch, network):
    """Whatever the host's variables say of other places."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, place)
    monkeypatch.setenv("NO_PROXY", "example.org")

    async def whole():
        async with playing(tmp_path, agent_network=network) as (registry, _):
            for way in ("client", "variables"):
                _, last = await episode(registry, **{"from": way})
                assert (last.reason, last.reward) == (DONE, 1.0)

    asyncio.run(whole())


HANGING = """
import asyncio

async def play(client, row):
    talk = [{"role": "user", "content": "Say well"}]
    await client.chat.completions.create(model="policy", messages=talk)
    await asyncio.Event().wait()
"""


def test_what_a_killed_process_played_is_given_up_at_once(tmp_path, monkeypatch):
    """However long an agent may be silent; what comes then is played by the next process."""
    monkeypatch.setenv("MRL_MODULES", str(tmp_path))

    async def whole():
        async with playing(tmp_path, agent=HANGING) as (registry, children):
            session = registry.offer("qwen", "sums", {"seed": 1})
            await asyncio.wait_for(session.opened(), 60)
            reply = session.step(PolicyTurn("well"))
            killed = children._children[0].started.process
            killed.kill()
            killed.wait()
            while not reply.done():
                await children.tend()
                await asyncio.sleep(0.05)
            assert (reply.result().reason, reply.result().has_failed) == (GIVEN_UP, False)
            assert reply.result().words == "the agent process exited"
            opened = registry.offer("qwen", "sums", {"seed": 2}).opened()
            while not opened.done():
                await children.tend()
                await asyncio.sleep(0.05)
            assert not opened.result().done
            return registry.counts["expired"]

    with structlog.testing.capture_logs() as logs:
        assert asyncio.run(whole()) == 1
    (told,) = [one for one in logs if one["event"] == "agent process exited; restarting it"]
    assert told["episodes_given_up"] == 1


@needs_namespaces
def test_an_agent_reaches_the_gateway_and_nothing_else(tmp_path, place):
    """By its client and by one of its own; what wants another place fails, with the key that changes it."""

    async def whole():
        async with playing(tmp_path, host="192.0.2.7") as (registry, children):  # as for other hosts; none here has it
            for way in ("client", "variables"):
                _, last = await episode(registry, **{"from": way})
                assert (last.reason, last.reward) == (DONE, 1.0)
            for elsewhere in (place, "http://192.0.2.1/", "http://nowhere.example/"):
                first, _ = await episode(registry, place=elsewhere, **{"from": "elsewhere"})
                assert first.reason == RAISED
                assert 'tasks.sums.agent_network = "host"' in first.words
                assert "my_agents.py" in first.words
            killed = children._children[0].started.process
            killed.kill()
            killed.wait()
            await children.tend()  # which sees the end, and starts another when its pause is over
            while not children.num_alive:
                await asyncio.sleep(0.05)
                await children.tend()
            _, last = await episode(registry, **{"from": "variables"})
            assert (last.reason, last.reward) == (DONE, 1.0)
            assert len(children._starts._runner.sites) == 2, "the gateway listens no longer for the one that is gone"

    with structlog.testing.capture_logs() as logs:
        asyncio.run(whole())
    told = [one for one in logs if one["event"] == "agents can reach only the gateway"]
    assert [(one["task"], one["unless"]) for one in told] == [("sums", 'tasks.sums.agent_network = "host"')]


def test_an_agent_of_the_host_reaches_all_that_the_host_does(tmp_path, place):
    """The other server and the gateway."""

    async def whole():
        async with playing(tmp_path, agent_network="host") as (registry, _):
            first, last = await episode(registry, place=place, **{"from": "elsewhere"})
            assert [one.content for one in first.messages] == ["found"]
            assert (last.reason, last.reward) == (DONE, 1.0)
            first, _ = await episode(registry, place="http://127.0.0.1:1/", **{"from": "elsewhere"})
            assert first.reason == RAISED
            assert "agent_network" not in first.words

    asyncio.run(whole())


@needs_namespaces
@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not here")
def test_where_there_is_no_namespace_the_agent_plays_all_the_same_and_it_is_told(tmp_path, place, monkeypatch):
    """By a kernel that refuses: the log has the reason and the key, and so has the check."""
    refusing = ["unshare", "-Ur", "sh", "-c", REFUSING, "sh"]
    monkeypatch.setattr(agent_start, "fenced", lambda argv, port: [*refusing, *fenced(argv, port)])

    async def whole():
        async with playing(tmp_path) as (registry, _):
            first, last = await episode(registry, place=place, **{"from": "elsewhere"})
            assert [one.content for one in first.messages] == ["found"]
            assert (last.reason, last.reward) == (DONE, 1.0)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(whole())
    (told,) = [one for one in logs if one["log_level"] == "warning"]
    assert "no network namespace available" in told["event"]
    assert "No space left" in told["why"]
    assert told["cure"].startswith('set tasks.sums.agent_network = "host"')
    asked = "from mrl.gateway.agent_network import described_network; print(described_network())"
    done = subprocess.run([*refusing, sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("all that this host reaches")
    assert "No space left" in done.stdout
    assert described_network() == "only the gateway"


@needs_namespaces
def test_nobody_has_to_be_root_to_leave_and_stays_who_it_is():
    """A process without rights is in a namespace of users as well, as the same user."""
    read_end, write_end = os.pipe()
    words = "ended"
    if not (pid := os.fork()):
        try:
            if not os.getuid():
                os.setgroups([])
                os.setgid(12346)
                os.setuid(12345)
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as one is that was started as this user
            before = os.getuid(), os.getgid()
            agent_network._leave()
            with socket.create_server(("127.0.0.1", 0)):
                words = "same" if before == (os.getuid(), os.getgid()) else f"{before} -> {os.getuid()}"
        except OSError as error:
            words = repr(error)
        finally:
            os.write(write_end, words.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as said:
        assert said.read() == "same"
    os.waitpid(pid, 0)


def test_an_error_is_for_want_of_a_network_whatever_it_is_wrapped_in():
    """Libraries raise their own from it; others are nothing of the kind."""

    def search():
        try:
            socket.create_connection(("127.0.0.1", 1), timeout=10)
        except OSError as error:
            raise RuntimeError("cannot search") from ExceptionGroup("all failed", [error])

    with pytest.raises(RuntimeError) as found:
        search()
    assert is_for_want_of_network(found.value)
    assert is_for_want_of_network(socket.gaierror(-3, "Temporary failure in name resolution"))
    assert not is_for_want_of_network(ValueError("no"))
    assert not is_for_want_of_network(FileNotFoundError(2, "no file"))
