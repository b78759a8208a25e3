"""The HTTP server with real clients: agents by the openai package, seats by that of environment processes."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from mrl.files import replace_file
from mrl.gateway.agent_process import Player
from mrl.gateway.gateway_connection import GatewayConnection
from mrl.gateway.routes import SESSION_HEADER, Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.gateway.unauthenticated import MAX_STRANGERS, NEW_S
from mrl.records.direct_requests import TokenLogprob, TurnChunk
from mrl.records.episodes import Message, ToolCall
from mrl.tasks.environments.contract import CUT, DONE, GIVEN_UP, RAISED, PolicyTurn
from mrl.tasks.environments.gateway_location import ENDPOINT, SEAT_KEY, GatewayLocation
from mrl.tasks.environments.opening import open_environment
from mrl.tasks.environments.user_class import BadReturn
from mrl.transport.endpoints import publish_endpoint

KEY, OF_SEATS = "mrl-agents", "mrl-seats"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Rig:
    """A gateway on loopback, and seats of its run."""

    def __init__(self, folder, url, registry):
        self.folder, self.url, self.registry = folder, url, registry
        self.seats, self.clients = [], []

    def client(self, key):
        """An agent's client."""
        self.clients.append(AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0))
        return self.clients[-1]

    async def opened(self, http, key=KEY, **asked):
        """A session, or the refusal."""
        return await self.post(http, "/sessions", asked, key)

    async def post(self, http, path, body, key=KEY, **headers):
        """Status and answer."""
        headers |= {"Authorization": f"Bearer {key}"}
        async with http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    def seat(self, task="guess", policy="qwen"):
        """The environment of one episode, as an environment process opens it."""
        self.seats.append(open_environment(GatewayLocation(self.folder, policy).name(task))())
        return self.seats[-1]


@asynccontextmanager
async def gateway(folder, *, max_body_bytes=1 << 20, seat_key=OF_SEATS):
    """A rig."""
    registry = SessionRegistry(idle_s=60.0)
    keys = {"key": KEY, "seat_key": OF_SEATS}
    given = {"policies": ["qwen", "llama"], "tasks": ["guess", "shop", "letters", "sums"]}
    server = Gateway(registry, **given, **keys, max_body_bytes=max_body_bytes)
    runner = server.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    publish_endpoint(folder / "endpoints", ENDPOINT, f"tcp://127.0.0.1:{port}")
    (folder / "keys").mkdir(exist_ok=True)
    replace_file(folder / "keys" / SEAT_KEY, seat_key.encode())
    rig = Rig(folder, f"http://127.0.0.1:{port}/v1", registry)
    rig.port, rig.server, rig.runner = port, server, runner
    try:
        yield rig
    finally:
        for client in rig.clients:
            await client.close()
        for seat in rig.seats:
            await asyncio.to_thread(seat.close)
        await runner.cleanup()


def run(folder, script, **options):
    """What an async function of (rig, http) returns."""

    async def whole():
        connector = aiohttp.TCPConnector(limit=0)
        async with gateway(folder, **options) as rig, aiohttp.ClientSession(connector=connector) as http:
            return await script(rig, http)

    return asyncio.run(whole())


def test_a_client_names_its_session(tmp_path):
    """By a header beside the run's key; asked for again it is the same one, and behind its end there is none."""

    async def script(rig, http):
        seat, other = rig.seat(), rig.seat()
        first = asyncio.ensure_future(elsewhere(seat.reset, 7, {}))
        async with AsyncOpenAI(
            base_url=rig.url, api_key=KEY, max_retries=0, default_headers={SESSION_HEADER: "player-7"}
        ) as client:
            opened = [await client.post("/sessions", body={"task": "guess"}, cast_to=dict) for _ in range(2)]
            with pytest.raises(
                openai.ConflictError, match="player-7 is for policy qwen and task guess; use another name"
            ):
                await client.post("/sessions", body={"task": "letters"}, cast_to=dict)
            waiting = asyncio.ensure_future(elsewhere(other.reset, 8, {}))
            asking = asyncio.ensure_future(ask(client, "1 + 2?"))
            await first
            last = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("3")))
            said = (await asking).choices[0].message.content
            path = "/sessions/player-7/reward"
            with pytest.raises(openai.AuthenticationError, match="another session"):
                await client.post(path.replace("7", "8"), body={"reward": 1.0}, cast_to=dict)
            await client.post(path, body={"reward": 0.5}, cast_to=dict)
            reward = (await last).reward
            await elsewhere(seat.close)
            while "player-7" in rig.registry._taken:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.APIStatusError, match="player-7 is over; use another name for the next"):
                await client.post("/sessions", body={"task": "guess"}, cast_to=dict)
        assert not waiting.done()
        await elsewhere(other.close)
        await asyncio.gather(waiting, return_exceptions=True)
        return opened, said, reward

    (opened, again), said, reward = run(tmp_path, script)
    assert opened == again
    assert (opened["id"], opened["row"], said, reward) == ("player-7", {"seed": 7}, "3", 0.5)


async def ask(client, text="Hi", **how):
    """The policy's answer to a conversation of one message."""
    talk = [{"role": "user", "content": text}]
    return await client.chat.completions.create(model="policy", messages=talk, **how)


async def lined(folder):
    """The line of a worker that plays episodes."""
    line = GatewayConnection(folder)
    while line._socket is None:
        await asyncio.sleep(0.005)
    return line


async def elsewhere(work, *arguments):
    """A call of a seat, which waits, in a thread as environment processes have it."""
    return await asyncio.to_thread(work, *arguments)


def test_an_agent_with_tools_plays_an_episode(tmp_path):
    """Real clients at both ends: messages, calls, and the reward arrive as they were meant."""

    async def script(rig, http):
        seat = rig.seat()
        first = asyncio.ensure_future(elsewhere(seat.reset, 7, {"word": "hay"}))
        _, session = await rig.opened(http)
        assert (session["row"], session["task"], session["model"]) == ({"seed": 7, "word": "hay"}, "guess", "qwen")
        async with rig.client(session["api_key"]) as client:
            talk = [{"role": "user", "content": "1 + 2?"}]
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=talk, tools=[ADD], temperature=0.3)
            )
            turn = await first
            assert (turn.messages, [tool.name for tool in turn.tools]) == ((Message("user", "1 + 2?"),), ["add"])
            calls = PolicyTurn("<tool_call>", tool_calls=(ToolCall("add", '{"a":1}'),))
            second = asyncio.ensure_future(elsewhere(seat.step, calls))
            said = (await asking).choices[0].message
            assert json.loads(said.tool_calls[0].function.arguments) == {"a": 1}
            talk += [said.model_dump(exclude_none=True)]
            talk += [{"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="qwen", messages=talk, tools=[ADD], stream=True)
            )
            assert (await second).messages == (Message("tool", "3", name="add"),)
            last = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("It is 3")))
            streamed = [chunk.choices[0].delta.content async for chunk in await asking]
            assert "".join(part or "" for part in streamed) == "It is 3"
        status, _ = await rig.post(http, f"/sessions/{session['id']}/reward", {"reward": 1.0})
        ended = await last
        return status, ended.reward, ended.reason

    assert run(tmp_path, script) == (200, 1.0, DONE)


def test_an_agent_that_rewrites_its_conversation_begins_a_branch(tmp_path):
    """All of it reaches the seat, with the tools of the request, however long it is; what is too long is refused."""
    talk = [{"role": "user", "content": "q"}]
    sub = [{"role": "system", "content": "look it up"}, *[{"role": "user", "content": "x" * 4096}] * 500]

    async def script(rig, http):
        seat = rig.seat()
        opened = asyncio.ensure_future(elsewhere(seat.reset, 7, {}))
        _, session = await rig.opened(http)
        async with rig.client(session["api_key"]) as client:

            def ask(messages, **how):
                return asyncio.ensure_future(client.chat.completions.create(model="policy", messages=messages, **how))

            asking = ask(talk)
            await opened
            step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("7")))
            await asking
            with pytest.raises(openai.BadRequestError, match="at most 2,097,152"):
                await ask([*sub, *sub[1:20]])
            asking, again = ask(sub, tools=[ADD]), ask(sub, tools=[ADD])
            branch = await step
            step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("9")))
            said = {one.choices[0].message.content for one in (await asking, await again)}
        await rig.post(http, f"/sessions/{session['id']}/reward", {"reward": 1.0})
        await step
        return branch, said, dict(rig.registry.counts)

    branch, said, counts = run(tmp_path, script, max_body_bytes=4 << 20)
    assert branch.begins_row
    assert [(one.role, one.content) for one in branch.messages] == [(one["role"], one["content"]) for one in sub]
    assert [tool.name for tool in branch.tools] == ["add"]
    assert said == {"9"}
    assert (counts["branches"], counts["refused/too_long"]) == (1, 1)


def test_an_agent_has_the_beginning_of_a_turn_while_it_goes_on(tmp_path):
    """From the line of the worker that plays the episode; calls come whole, with the turn."""

    async def script(rig, http):
        seat, line = rig.seat(), await lined(tmp_path)
        first = asyncio.ensure_future(elsewhere(seat.reset, 7, {}))
        _, session = await rig.opened(http)
        async with rig.client(session["api_key"]) as client:
            talk = [{"role": "user", "content": "1 + 2?"}]
            opening = asyncio.ensure_future(
                client.chat.completions.create(model="policy", messages=talk, tools=[ADD], stream=True)
            )
            asked = await first
            assert asked.stream == session["id"]
            line.send(TurnChunk(session=asked.stream, num_turns=0, start=0, text="Let me"))
            stream = await opening
            chunks = [await anext(stream)]
            calls = PolicyTurn("-", tool_calls=(ToolCall("add", '{"a":1}'), ToolCall("add")), content="Let me see")
            second = asyncio.ensure_future(elsewhere(seat.step, calls))
            chunks += [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert [delta.content for delta in deltas] == ["Let me", " see", None, None]
            assert [(one.index, one.function.arguments) for one in deltas[2].tool_calls] == [(0, '{"a":1}'), (1, "{}")]
            assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "tool_calls"]
            assert {(chunk.id, chunk.model) for chunk in chunks} == {(f"{session['id']}-1", "qwen")}
            again = await client.chat.completions.create(model="policy", messages=talk, tools=[ADD], stream=True)
            assert [chunk.choices[0].delta.content async for chunk in again] == ["Let me see", None, None]
        await rig.post(http, f"/sessions/{session['id']}/fail", {})
        await second
        await asyncio.to_thread(line.close)

    run(tmp_path, script)


def test_a_turn_that_is_given_up_ends_its_stream_with_the_reason(tmp_path):
    """As the last event, since the answer has begun; without a beginning it is an answer of its own."""

    async def script(rig, http):
        seats, line, found = [rig.seat(), rig.seat()], await lined(tmp_path), []
        for seat, text in zip(seats, ("Le", ""), strict=True):
            first = asyncio.ensure_future(elsewhere(seat.reset, 7, {}))
            _, session = await rig.opened(http)
            body = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stream": True}
            headers = {"Authorization": f"Bearer {session['api_key']}"}
            opening = asyncio.ensure_future(http.post(f"{rig.url}/chat/completions", json=body, headers=headers))
            asked = await first
            if text:
                line.send(TurnChunk(session=asked.stream, num_turns=0, start=0, text=text))
                await opening
            await elsewhere(seat.close)
            async with await opening as answer:
                found.append((answer.status, (await answer.text()).splitlines()))
        await asyncio.to_thread(line.close)
        return found

    (begun, events), (refused, _) = run(tmp_path, script)
    assert (begun, refused) == (200, 400)
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "Le"
    assert "the engine was lost" in json.loads(events[2].removeprefix("data: "))["error"]["message"]


def test_models_are_the_policies(tmp_path):
    """A client that lists models finds the run's."""

    async def script(rig, http):
        async with rig.client(KEY) as client:
            return [model.id async for model in client.models.list()]

    assert run(tmp_path, script) == ["qwen", "llama"]


@pytest.mark.parametrize("key", ["", "wrong", "wrong.session", KEY + "x"])
def test_without_the_key_nothing_is_told(tmp_path, key):
    """Neither models nor sessions, whatever is asked."""

    async def script(rig, http):
        found = [(await rig.opened(http, key))[0]]
        for path in ("/chat/completions", "/sessions/x/reward", "/sessions/x/fail"):
            found.append((await rig.post(http, path, {}, key))[0])
        async with http.get(f"{rig.url}/models", headers={"Authorization": f"Bearer {key}"}) as answer:
            return {*found, answer.status}

    assert run(tmp_path, script) == {401}


def test_a_header_of_any_bytes_is_a_wrong_key(tmp_path):
    """No crash, and no stack in the log."""

    async def script(rig, http):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe.\xff\r\n\r\n")
        status = await reader.readline()
        writer.close()
        return status

    assert run(tmp_path, script).startswith(b"HTTP/1.1 401")


def test_the_key_of_a_session_ends_no_other_and_takes_none(tmp_path):
    """It may be handed to a client that is trusted with one episode."""

    async def script(rig, http):
        seats = [rig.seat(), rig.seat()]
        firsts = [asyncio.ensure_future(elsewhere(seat.reset, 0, {})) for seat in seats]
        (_, one), (_, other) = await rig.opened(http), await rig.opened(http)
        assert KEY not in one["api_key"]
        found = [await rig.post(http, f"/sessions/{other['id']}/fail", {}, one["api_key"])]
        found.append(await rig.opened(http, one["api_key"], wait_s=0))
        found.append(await rig.post(http, f"/sessions/{one['id']}/fail", {}, one["api_key"]))
        await rig.post(http, f"/sessions/{other['id']}/fail", {})
        await asyncio.gather(*firsts)
        return [status for status, _ in found]

    assert run(tmp_path, script) == [401, 401, 200]


def test_a_seat_finds_a_gateway_that_comes_later(tmp_path):
    """One that is away for a moment costs no episode."""

    async def script(rig, http):
        address = rig.folder / "endpoints" / f"{ENDPOINT}.json"
        told = address.read_bytes()
        address.unlink()
        first = asyncio.ensure_future(elsewhere(rig.seat().reset, 0, {}))
        await asyncio.sleep(0.7)
        assert not first.done()
        replace_file(address, told)
        _, session = await rig.opened(http)
        await rig.post(http, f"/sessions/{session['id']}/fail", {})
        return (await first).reason

    assert run(tmp_path, script) == RAISED


def test_a_seat_wants_a_key_of_its_own(tmp_path):
    """That of agents offers no episodes."""

    async def script(rig, http):
        with pytest.raises(BadReturn, match="cannot be reached"):
            await elsewhere(rig.seat().reset, 0, {})
        return rig.registry.num_offered

    assert run(tmp_path, script, seat_key=KEY) == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "words", "name"),
    [
        ("/chat/completions", {"model": "policy", "messages": []}, 400, "does not belong to an episode", None),
        ("/sessions/none/reward", {"reward": 1.0}, 404, "no such session", None),
        ("/sessions", {"model": "gpt"}, 404, "qwen, llama", None),
        ("/sessions", {"models": ["qwen", "gpt"]}, 404, "qwen, llama", None),
        (
            "/sessions",
            {"task": "gues", "wait_s": 0},
            404,
            "task 'gues': wanted one of guess, shop, letters, sums",
            None,
        ),
        ("/sessions", {"models": ["qwen", "qwen"]}, 400, "different policies", None),
        ("/sessions", {"models": []}, 400, "different policies", None),
        ("/sessions", {"wait_s": -1}, 400, "wait_s", None),
        ("/sessions", {"wait_s": 0}, 503, "try again", None),
        ("/sessions", {}, 400, "MRL-Session 'a.b': wanted 1 to 64 letters, digits, - and _", "a.b"),
        ("/sessions", {}, 400, "MRL-Session '': wanted", ""),
        ("/sessions", {}, 400, "wanted 1 to 64 letters", "a" * 65),
        ("/sessions", {"models": ["qwen", "llama"]}, 400, "names one session; omit it when asking for", "a"),
    ],
)
def test_mistakes_of_agents_are_told(tmp_path, path, body, status, words, name):
    """In the form in which clients look for the reason."""

    async def script(rig, http):
        return await rig.post(http, path, body, **({} if name is None else {SESSION_HEADER: name}))

    code, answer = run(tmp_path, script)
    assert code == status
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("asking", "status", "route"),
    [
        (lambda client: client.responses.create(model="policy", input="Hi"), 404, "POST /v1/responses"),
        (lambda client: client.embeddings.create(model="policy", input="Hi"), 404, "POST /v1/embeddings"),
        (lambda client: client.with_options(base_url=f"{client.base_url}/../..").models.list(), 404, "GET /models"),
        (lambda client: client.get("/completions", cast_to=dict), 405, "GET /v1/completions"),
    ],
)
def test_who_asks_for_a_route_that_is_not_there_is_told_those_that_are(tmp_path, asking, status, route):
    """In the form in which clients of OpenAI's API look for the reason; routes of the run's own are none of theirs."""

    async def script(rig, http):
        with pytest.raises(openai.APIStatusError) as caught:
            await asking(rig.client(KEY))
        return caught.value, rig.registry.counts["refused/no_route"]

    error, refused = run(tmp_path, script)
    assert (error.status_code, error.code, refused) == (status, "no_route", 1)
    assert (
        f"no route {route}; available: GET /v1/models, POST /v1/sessions, POST /v1/chat/completions," in error.message
    )
    assert "/v1/sessions/{session}/reward" in error.message
    assert "/seat" not in error.message


@pytest.mark.parametrize(
    ("asked", "status", "code", "words"),
    [
        ({"data": b"x" * 5000}, 413, "too_long", "body size 1000 exceeded"),
        ({"data": b"{}", "headers": {"Content-Encoding": "gzip"}}, 400, "invalid_request", "the body cannot be read"),
    ],
)
def test_what_the_server_refuses_is_told_as_any_mistake(tmp_path, asked, status, code, words):
    """Before a handler has read the body; a body that is too long is not read."""

    async def script(rig, http):
        headers = {"Authorization": f"Bearer {KEY}"} | asked.get("headers", {})
        async with http.post(f"{rig.url}/sessions", **asked | {"headers": headers}) as answer:
            return answer.status, await answer.text(), rig.registry.counts[f"refused/{code}"]

    got, text, refused = run(tmp_path, script, max_body_bytes=1000)
    assert (got, refused) == (status, 1), text
    error = json.loads(text)["error"]
    assert error["code"] == code
    assert words in error["message"]


def test_episodes_go_to_who_asks_for_their_policy_and_task(tmp_path):
    """And each to one agent alone."""

    async def script(rig, http):
        seats = [rig.seat("guess", "qwen"), rig.seat("guess", "llama"), rig.seat("shop", "llama")]
        firsts = [asyncio.ensure_future(elsewhere(seat.reset, 0, {})) for seat in seats]
        _, one = await rig.opened(http, model="llama", task="shop")
        _, other = await rig.opened(http, model="llama")
        status, _ = await rig.opened(http, model="llama", wait_s=0)
        for session in (one, other):
            await rig.post(http, f"/sessions/{session['id']}/fail", {"reason": "enough"})
        _, last = await rig.opened(http)
        await rig.post(http, f"/sessions/{last['id']}/fail", {})
        turns = await asyncio.gather(*firsts)
        return (one["task"], other["task"], status, last["model"]), {turn.reason for turn in turns}

    assert run(tmp_path, script) == (("shop", "guess", 503, "qwen"), {RAISED})


def test_an_agent_hears_at_once_that_its_episode_was_given_up(tmp_path):
    """The engine was lost: the seat hangs up while the agent waits for a turn."""

    async def script(rig, http):
        seat = rig.seat()
        first = asyncio.ensure_future(elsewhere(seat.reset, 0, {}))
        _, session = await rig.opened(http)
        async with rig.client(session["api_key"]) as client:
            asking = asyncio.ensure_future(ask(client))
            await first
            await elsewhere(seat.close)
            with pytest.raises(openai.BadRequestError, match="the engine was lost"):
                await asking
        status, answer = await rig.post(http, f"/sessions/{session['id']}/reward", {"reward": 1.0})
        return status, answer["error"]["code"], dict(rig.registry.counts)["ends/given_up"]

    assert run(tmp_path, script) == (410, "episode_over", 1)


def test_a_crowd_without_a_key_keeps_nobody_out(tmp_path):
    """Half of them say nothing, half something else; the oldest go, and whoever has a key stays and is served."""

    async def script(rig, http):
        first = asyncio.ensure_future(rig.opened(http, wait_s=30))
        while not rig.registry.num_waiting:
            await asyncio.sleep(0.01)
        crowd = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(2 * MAX_STRANGERS)]
        for _, writer in crowd[::2]:
            writer.write(b"GET /v1/models")
        while len(rig.runner.server.connections) < len(crowd):
            await asyncio.sleep(0.01)
        rig.server.send_strangers_away(rig.runner)
        assert rig.registry.counts["refused/stranger"] == 0, "their first requests may be on their way"
        await asyncio.sleep(NEW_S)
        rig.server.send_strangers_away(rig.runner)
        async with rig.client(KEY) as client:
            models = [model.id async for model in client.models.list()]
        seat = rig.seat()
        await asyncio.gather(elsewhere(seat.reset, 0, {}), first, _fails(rig, http, first))
        for _, writer in crowd:
            writer.close()
        return len(models), rig.registry.counts["refused/stranger"]

    assert run(tmp_path, script) == (2, MAX_STRANGERS)


async def _fails(rig, http, opened):
    _, session = await opened
    await rig.post(http, f"/sessions/{session['id']}/fail", {})


def test_an_episode_whose_gateway_dies_is_given_up_and_has_not_failed(tmp_path):
    """Whatever the seat waits for, or asks next."""

    async def script(rig, http):
        waiting, playing = rig.seat(), rig.seat()
        first = asyncio.ensure_future(elsewhere(waiting.reset, 0, {}))
        while not rig.registry.num_offered:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(elsewhere(playing.reset, 1, {}))
        while rig.registry.num_offered < 2:
            await asyncio.sleep(0.01)
        await rig.runner.cleanup()
        turns = [await first, await second, await elsewhere(playing.step, PolicyTurn("Hi"))]
        return {(turn.reason, turn.has_failed) for turn in turns}

    assert run(tmp_path, script) == {(GIVEN_UP, False)}


def test_idle_agents_wait_without_harm(tmp_path):
    """A thousand, and one who asks for models is answered meanwhile; the next episode goes to one of them."""

    async def script(rig, http):
        waiting = [asyncio.ensure_future(rig.opened(http, wait_s=30)) for _ in range(1000)]
        while rig.registry.num_waiting < 1000:
            await asyncio.sleep(0.01)
        async with rig.client(KEY) as client:
            models = [model.id async for model in client.models.list()]
        seat = rig.seat()
        first = asyncio.ensure_future(elsewhere(seat.reset, 0, {}))
        done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in others:
            one.cancel()
        (status, session) = done.pop().result()
        await rig.post(http, f"/sessions/{session['id']}/fail", {})
        await first
        return status, len(models)

    assert run(tmp_path, script) == (200, 2)


@asynccontextmanager
async def seat_of(rig, http, agent, row=None):
    """The seat of an episode that a function plays, and what that asks first."""
    playing = asyncio.ensure_future(Player(agent, "guess", rig.client(KEY)).play(http))
    seat = rig.seat()
    yield seat, await elsewhere(seat.reset, 0, row or {})
    playing.cancel()


async def wins(client, row):
    """Asks once; whoever answers with the word of the row wins."""
    answer = await ask(client, "Say it")
    if row["word"] == "bad":
        raise KeyError("no such word")
    return answer.choices[0].message.content == row["word"]


@pytest.mark.parametrize(
    ("word", "turn", "reward", "reason"),
    [
        ("hay", PolicyTurn("hay"), 1.0, DONE),
        ("hay", PolicyTurn("straw"), 0.0, DONE),
        ("bad", PolicyTurn("bad"), None, RAISED),
    ],
)
def test_a_function_of_the_users_plays(tmp_path, word, turn, reward, reason, capsys):
    """What it returns is the reward; what it raises fails its own episode, and names its line."""

    async def script(rig, http):
        async with seat_of(rig, http, wins, {"word": word}) as (seat, _):
            return await elsewhere(seat.step, turn)

    last = run(tmp_path, script)
    assert (last.reward, last.reason) == (reward, reason)
    assert ("KeyError" in last.words and "test_routes.py" in last.words) == (reason == RAISED)


HELLO = (TokenLogprob(7, b"Hel", -0.5), TokenLogprob(9, b"lo\xf0", -1.25), TokenLogprob(1, b"<end>", -0.125))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_gets_the_log_probabilities_of_a_turn(tmp_path, is_streamed):
    """Token by token, where it asks for them, as OpenAI's client reads them; in a stream they come at its end."""

    async def script(rig, http):
        found = []

        async def agent(client, row):
            talk, told = [{"role": "user", "content": "Hi"}], []
            for wants in (True, False):
                how = {"model": "policy", "messages": talk, "logprobs": wants, "stream": is_streamed}
                answer = await client.chat.completions.create(**how)
                chunks = [one async for one in answer] if is_streamed else [answer]
                told.append([one.choices[0].logprobs for one in chunks if one.choices[0].logprobs is not None])
                talk += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Well"}]
            found.extend(told)
            return 1.0

        async with seat_of(rig, http, agent) as (seat, first):
            second = await elsewhere(seat.step, PolicyTurn("Hello", sampled=HELLO))
            await elsewhere(seat.step, PolicyTurn("Hello"))
        return first.wants_tokens, second.wants_tokens, found

    first, second, ((told,), others) = run(tmp_path, script)
    assert (first, second, others) == (True, False, [])
    assert [(one.logprob, bytes(one.bytes), one.token, one.top_logprobs) for one in told.content] == [
        (-0.5, b"Hel", "Hel", []),
        (-1.25, b"lo\xf0", "lo\N{REPLACEMENT CHARACTER}", []),
        (-0.125, b"<end>", "<end>", []),
    ]


def test_two_policies_play_one_agent_together(tmp_path):
    """One answers, the other checks: both from the same start state, each with its own turns and its own reward."""

    async def debate(clients, row):
        said = (await ask(clients["qwen"], f"{row['seed']}?")).choices[0].message.content
        checked = await ask(clients["llama"], f"Is {said} right?")
        return {"qwen": 1.0, "llama": float(checked.choices[0].message.content == "yes")}

    async def script(rig, http):
        playing = asyncio.ensure_future(Player(debate, "guess", rig.client(KEY)).play(http))
        others = [rig.seat(policy="llama"), rig.seat(policy="qwen")]
        waiting = [asyncio.ensure_future(elsewhere(seat.reset, 7, {})) for seat in others[:1]]
        seats = {name: rig.seat(policy=name) for name in ("qwen", "llama")}
        firsts = {name: asyncio.ensure_future(elsewhere(seat.reset, 8, {})) for name, seat in seats.items()}
        assert (await firsts["qwen"]).messages[0].content == "8?"
        last = asyncio.ensure_future(elsewhere(seats["qwen"].step, PolicyTurn("64")))
        assert (await firsts["llama"]).messages[0].content == "Is 64 right?"
        checked = await elsewhere(seats["llama"].step, PolicyTurn("no"))
        assert not waiting[0].done()
        playing.cancel()
        for seat in rig.seats:
            await elsewhere(seat.close)
        await asyncio.gather(*waiting, return_exceptions=True)
        return (await last).reward, checked.reward

    assert run(tmp_path, script) == (1.0, 0.0)


def test_rewards_of_several_policies_are_by_name(tmp_path, capsys):
    """One number for two policies fails both episodes, and says what was wanted."""

    async def debate(clients, row):
        for client in clients.values():
            await ask(client)
        return 1.0

    async def script(rig, http):
        playing = asyncio.ensure_future(Player(debate, "guess", rig.client(KEY)).play(http))

        def episode(policy):
            seat = rig.seat(policy=policy)
            seat.reset(8, {})
            return seat.step(PolicyTurn("Hi"))

        lasts = await asyncio.gather(elsewhere(episode, "qwen"), elsewhere(episode, "llama"))
        playing.cancel()
        return [last.words for last in lasts]

    for words in run(tmp_path, script):
        assert "wanted a dict with a reward for each of qwen, llama" in words


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e9])
def test_a_reward_that_is_refused_fails_its_episode_at_once(tmp_path, reward):
    """Its agent has nothing else to give."""

    async def agent(client, row):
        await ask(client)
        return reward

    async def script(rig, http):
        async with seat_of(rig, http, agent) as (seat, _):
            return await elsewhere(seat.step, PolicyTurn("Hi"))

    last = run(tmp_path, script)
    assert (last.reason, f"reward {reward} refused" in last.words) == (RAISED, True)


def test_an_agent_that_gives_up_while_the_policy_has_its_turn(tmp_path, capsys):
    """As one with a time limit of its own does: the seat hears it with the turn that it brings."""

    async def agent(client, row):
        async with asyncio.timeout(0.2):
            await ask(client)

    async def script(rig, http):
        async with seat_of(rig, http, agent) as (seat, _):
            (session,) = rig.registry._taken.values()
            while session._parting is None:
                await asyncio.sleep(0.01)
            return await elsewhere(seat.step, PolicyTurn("Hi"))

    last = run(tmp_path, script)
    assert (last.reason, "TimeoutError" in last.words) == (RAISED, True)


def test_a_seat_tells_a_cut_turn(tmp_path):
    """The agent gets the text with the reason "length"."""

    async def script(rig, http):
        found = []

        async def agent(client, row):
            answer = await ask(client)
            found.append((answer.choices[0].message.content, answer.choices[0].finish_reason))
            return 0.5

        async with seat_of(rig, http, agent) as (seat, _):
            last = await elsewhere(seat.finish, CUT, PolicyTurn("It is", is_cut=True))
        return found, last.reward, last.reason

    assert run(tmp_path, script) == ([("It is", "length")], 0.5, CUT)


def test_many_episodes_at_once(tmp_path):
    """Two hundred seats, one process's worth of agents: each gets its own turns and reward."""

    async def script(rig, http):
        async def agent(client, row):
            answer = await ask(client, str(row["seed"]))
            return int(answer.choices[0].message.content)

        playing = asyncio.ensure_future(Player(agent, "", rig.client(KEY)).play(http))
        rewards = {}

        def episode(number):
            seat = rig.seat()
            first = seat.reset(number, {})
            assert first.messages[0].content == str(number)
            rewards[number] = seat.step(PolicyTurn(str(number))).reward

        threads = [threading.Thread(target=episode, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        await elsewhere(lambda: [thread.join() for thread in threads])
        playing.cancel()
        return rewards

    assert run(tmp_path, script) == {number: float(number) for number in range(200)}


def test_an_agent_says_of_which_kind_its_failure_is(tmp_path):
    """One that is none of an agent's is refused, and the episode goes on."""

    async def script(rig, http):
        seat = rig.seat()
        opened = asyncio.ensure_future(elsewhere(seat.reset, 0, {}))
        _, session = await rig.opened(http)
        status, refusal = await rig.post(http, f"/sessions/{session['id']}/fail", {"kind": "done"})
        assert (status, refusal["error"]["message"]) == (400, "kind 'done': wanted one of raised, memory, timeout")
        await rig.post(http, f"/sessions/{session['id']}/fail", {"reason": "no room", "kind": "memory"})
        return await opened

    last = run(tmp_path, script)
    assert (last.reason, last.words, last.has_failed) == ("memory", "the agent reported a failure: no room", True)
