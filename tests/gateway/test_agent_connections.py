"""Connections of agents and of their seats: many requests of one process wait for turns, and turns take long."""

import asyncio
import resource
from contextlib import closing
from functools import partial

import pytest
from aiohttp import web

from mrl.gateway.agent_process import client_of
from mrl.tasks.environments.contract import DONE, GIVEN_UP, TIMEOUT, PolicyTurn
from mrl.tasks.environments.environment_pool import EnvironmentPool
from mrl.tasks.environments.gateway_location import GatewayLocation
from tests.gateway.test_routes import elsewhere, run, seat_of, wins

MANY = 1010
"""More than openai's client has connections if it is not told otherwise."""
TALK = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}


def test_every_episode_of_a_process_asks_while_all_others_wait_for_their_turns():
    """In a synchronous run no turn is sampled before: here the server answers nobody until all have asked."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * MANY), hard))  # as a run does for its processes

    async def script():
        asked, all_asked = [], asyncio.Event()

        async def turn(request):
            asked.append(request)
            if len(asked) == MANY:
                all_asked.set()
            await all_asked.wait()
            return web.json_response({"id": "1", "object": "chat.completion", "choices": []})

        application = web.Application()
        application.router.add_post("/v1/chat/completions", turn)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=MANY).start()
        try:
            async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key") as client:
                asking = (client.chat.completions.create(**TALK) for _ in range(MANY))
                async with asyncio.timeout(60):
                    return len(await asyncio.gather(*asking))
        finally:
            await runner.cleanup()

    assert asyncio.run(script()) == MANY


@pytest.mark.parametrize("agent_s", [0.0, 0.3])
def test_a_turn_may_take_longer_than_the_gateway_waits_for_a_pong(tmp_path, monkeypatch, agent_s):
    """A seat answers pings while the policy has its turn, however long the agent took before."""
    quick = partial(web.WebSocketResponse, max_msg_size=1 << 20, heartbeat=0.4)
    monkeypatch.setattr("mrl.gateway.routes.web.WebSocketResponse", lambda **_: quick())

    async def slowly(client, row):
        await asyncio.sleep(agent_s)
        return await wins(client, row)

    async def script(rig, http):
        async with seat_of(rig, http, slowly, {"word": "hay"}) as (seat, _):
            await asyncio.sleep(1.5)
            return await elsewhere(seat.step, PolicyTurn("hay"))

    last = run(tmp_path, script)
    assert (last.reason, last.reward) == (DONE, 1.0)


def test_an_episode_that_no_agent_takes_is_given_up_and_one_whose_agent_stops_has_failed(tmp_path):
    """An environment that fails to start, again and again, ends the run; agents that come late never do."""

    async def script(rig, http):
        name = GatewayLocation(rig.folder, "qwen").name("guess")
        with closing(EnvironmentPool(name, processes=1, wall_s=4.0, cpu_s=60.0)) as pool:
            taken = pool.open(1, {})
            _, session = await rig.opened(http)
            asking = asyncio.ensure_future(rig.client(session["api_key"]).chat.completions.create(**TALK))
            await asyncio.wrap_future(taken.first)
            waiting = pool.open(2, {})
            answer = taken.step(PolicyTurn("hay"))
            await asking
            return [(await asyncio.wrap_future(one)).reason for one in (waiting.first, answer)]

    assert run(tmp_path, script) == [GIVEN_UP, TIMEOUT]


def test_the_wait_for_an_agent_is_no_time_of_its_episode(tmp_path):
    """An agent that took the episode late has as long as any other: 3 s of waiting and 2 s of play are not 5 s."""

    async def script(rig, http):
        name = GatewayLocation(rig.folder, "qwen").name("guess")
        with closing(EnvironmentPool(name, processes=1, wall_s=4.0, cpu_s=60.0)) as pool:
            late = pool.open(1, {})
            while not rig.registry.num_offered:
                await asyncio.sleep(0.01)
            await asyncio.sleep(3.0)
            _, session = await rig.opened(http)
            asking = asyncio.ensure_future(rig.client(session["api_key"]).chat.completions.create(**TALK))
            await asyncio.wrap_future(late.first)
            last = late.step(PolicyTurn("hay"))
            await asking
            await asyncio.sleep(2.0)
            await rig.post(http, f"/sessions/{session['id']}/reward", {"reward": 1.0})
            return (await asyncio.wrap_future(last)).reason

    assert run(tmp_path, script) == DONE
