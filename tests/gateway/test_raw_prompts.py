"""Turns of a session behind text or token ids without roles, by real clients over the real server."""

import asyncio
import io
import json

import pytest
from structlog.testing import capture_logs

from mrl.gateway.direct_wire import of_session, read_completion
from mrl.records.direct_requests import TokenLogprob, TurnChunk
from mrl.records.episodes import Message
from mrl.tasks.environments.contract import DONE, PolicyTurn, RawPrompt
from tests.gateway.test_routes import elsewhere, lined, run

SAMPLED = (TokenLogprob(7, b"Hel", -0.5), TokenLogprob(9, b"lo", -1.25), TokenLogprob(1, b"<end>", -0.125))
HELLO = PolicyTurn("Hello", sampled=SAMPLED)


async def begun(rig, http):
    """A seat on its way to its first text, and the client of its session beside the root of its routes."""
    seat = rig.seat()
    first = asyncio.ensure_future(elsewhere(seat.reset, 7, {}))
    _, session = await rig.opened(http)
    return seat, first, session, rig.client(session["api_key"])


def test_an_agent_asks_behind_text_and_ids(tmp_path):
    """What it gives goes to the seat as it is; the forms are those outside of episodes, without a count of tokens."""

    async def script(rig, http):
        seat, first, session, client = await begun(rig, http)
        asking = asyncio.ensure_future(client.completions.create(model="policy", prompt="1 + 2 =", logprobs=1))
        asked = [await first]
        second = asyncio.ensure_future(elsewhere(seat.step, HELLO))
        said = await asking
        body = {"model": "qwen", "token_ids": [5, 7, 9, 1, 6], "sampling_params": {"temperature": 0.1}}
        path = rig.url.removesuffix("/v1") + "/inference/v1/generate"
        with capture_logs() as logs:
            found = asyncio.ensure_future(client.post(path, body=body, cast_to=dict))
            asked.append(await second)
        last = asyncio.ensure_future(elsewhere(seat.step, HELLO))
        ids = await found
        await rig.post(http, f"/sessions/{session['id']}/reward", {"reward": 1.0})
        assert (await last).reason == DONE
        return asked, said, ids, logs

    asked, said, ids, logs = run(tmp_path, script)
    assert [one.bare for one in asked] == [RawPrompt("1 + 2 ="), RawPrompt(None, (5, 7, 9, 1, 6))]
    assert all(one.wants_tokens and not one.messages and not one.begins_row for one in asked)
    (choice,) = said.choices
    assert (choice.text, choice.finish_reason, said.model, said.usage) == ("Hello", "stop", "qwen", None)
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["Hel", "lo", "<end>"], [-0.5, -1.25, -0.125])
    assert said.id.endswith("-1")
    assert ids["request_id"].endswith("-2")
    assert [one["token_ids"] for one in ids["choices"]] == [[7, 9, 1]]
    assert [one["logprob"] for one in ids["choices"][0]["logprobs"]["content"]] == [-0.5, -1.25, -0.125]
    assert "usage" not in ids
    assert [one["asked"] for one in logs if "asked" in one] == ["temperature = 0.1"]


def test_such_a_turn_comes_as_it_grows_and_again_when_it_is_asked_for_again(tmp_path):
    """As a turn of a conversation does."""

    async def script(rig, http):
        (seat, first, _, client), line = await begun(rig, http), await lined(tmp_path)
        how = {"model": "policy", "prompt": "1", "stream": True}
        opening = asyncio.ensure_future(client.completions.create(**how))
        asked = await first
        line.send(TurnChunk(session=asked.stream, num_turns=0, start=0, text="Hel"))
        chunks = [await anext(stream := await opening)]
        step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("Hello", is_cut=True)))
        chunks += [chunk async for chunk in stream]
        again = await client.completions.create(model="policy", prompt="1")
        assert not step.done()
        await elsewhere(seat.close)
        await asyncio.gather(step, return_exceptions=True)
        await asyncio.to_thread(line.close)
        return [(one.choices[0].text, one.choices[0].finish_reason) for one in chunks], again.choices[0].text

    assert run(tmp_path, script) == ([("Hel", None), ("lo", None), ("", "length")], "Hello")


def test_messages_behind_such_a_turn_are_a_branch(tmp_path):
    """Nobody can say that they go on from text that has no roles, though they begin with what was said behind it."""

    async def script(rig, http):
        seat, first, _, client = await begun(rig, http)
        asking = asyncio.ensure_future(client.completions.create(model="policy", prompt="1"))
        await first
        step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("Hello")))
        await asking
        talk = [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}]
        asking = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=talk))
        branch = await step
        step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("Hello")))
        await asking
        talk += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "On"}]
        asking = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=talk))
        further = await step
        asking.cancel()
        return branch, further, rig.registry.counts["branches"]

    branch, further, count = run(tmp_path, script)
    talk = (Message("assistant", "Hello"), Message("user", "Hi"))
    assert (branch.begins_row, branch.messages, branch.bare, count) == (True, talk, None, 1)
    assert (further.begins_row, further.messages) == (False, (Message("user", "On"),))


def test_what_another_form_calls_its_sampling_is_nothing_here():
    """Nobody has looked at it."""
    for value in (5, "x", [1]):
        body = {"model": "policy", "prompt": "1", "sampling_params": value}
        assert of_session(read_completion(body), body).unheeded == {}


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/v1/completions", {"prompt": "1", "n": 2}, "a session takes one prompt and gives one answer"),
        ("/v1/completions", {"prompt": ["1", "2"]}, "a session takes one prompt and gives one answer"),
        ("/v1/completions", {"prompt": "1", "echo": True}, "echo: given tokens are not scored in a session"),
        ("/v1/completions", {"prompt": ""}, "the prompt has neither text nor token ids"),
        ("/v1/completions", {"prompt": "1" * (2 << 20) + "1"}, "at most 2,097,152"),
        ("/v1/completions", {"prompt": "1", "model": "llama"}, "model 'llama': wanted 'qwen' or 'policy'"),
        ("/inference/v1/generate", {"token_ids": "1"}, "token_ids: wanted a list of ids"),
        ("/inference/v1/generate", {"token_ids": [5] * ((1 << 19) + 1)}, "at most 524,288"),
    ],
)
def test_what_a_session_does_not_do_is_refused_in_a_line(tmp_path, path, asked, words):
    """And costs no turn."""

    async def script(rig, http):
        seat, first, session, _ = await begun(rig, http)
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        url = rig.url.removesuffix("/v1") + path
        body = io.BytesIO(json.dumps({"model": "qwen"} | asked).encode())
        async with http.post(url, data=body, headers=headers) as answer:
            told = answer.status, (await answer.json())["error"]["message"]
        assert not first.done()
        await elsewhere(seat.close)
        await asyncio.gather(first, return_exceptions=True)
        return told

    status, told = run(tmp_path, script, max_body_bytes=1 << 23)
    assert status in (400, 404)
    assert words in told


def test_a_turn_whose_tokens_are_too_many_is_not_told_as_none(tmp_path):
    """Ids are the whole answer where ids are asked for."""

    async def script(rig, http):
        seat, first, session, _ = await begun(rig, http)
        url, headers = rig.url.removesuffix("/v1"), {"Authorization": f"Bearer {session['api_key']}"}
        body = {"model": "qwen", "token_ids": [5]}
        asking = asyncio.ensure_future(http.post(f"{url}/inference/v1/generate", json=body, headers=headers))
        await first
        step = asyncio.ensure_future(elsewhere(seat.step, PolicyTurn("Hello")))
        async with await asking as answer:
            told = (await answer.json())["error"]["message"]
        await elsewhere(seat.close)
        await asyncio.gather(step, return_exceptions=True)
        return told

    assert "more than 65,536 tokens" in run(tmp_path, script)
