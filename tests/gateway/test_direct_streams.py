"""Answers outside of episodes as they grow: a real server, the openai package, workers' real lines."""

import asyncio
import json
import time

import openai
import pytest

from mrl.gateway import direct_stream
from mrl.records.direct_requests import LOST, DirectChunk, DirectRefusal, TokenLogprob
from mrl.records.episodes import ToolCall
from tests.gateway.test_direct_requests import ADD, KEY, TALK, run, says, until


def piece(request, text, *, version=5, ids=None):
    """One token for each letter, and their text."""
    sampled = tuple(TokenLogprob(65 + place, letter.encode(), -0.5) for place, letter in enumerate(text))
    return DirectChunk(request_id=request.request_id, version=version, text=text, sampled=sampled)


def silent(request):
    """A worker that answers when the test says so."""


async def asked_of(worker, count=1):
    """The newest of `count` requests."""
    await until(lambda: len(worker.asked) == count)
    return worker.asked[-1]


def test_a_client_has_the_first_piece_while_the_answer_goes_on(tmp_path):
    """In order, all of it, once; why it ended and what it cost stand last."""

    async def script(rig, _):
        worker = await rig.worker(silent)
        asking = rig.client.chat.completions.create(
            model="qwen", messages=TALK, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        opening = asyncio.ensure_future(asking)
        request = await asked_of(worker)
        worker.line.send(piece(request, "on"))
        stream = await opening
        chunks = [await anext(stream)]
        assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "on")
        worker.line.send(piece(request, "e"))
        chunks.append(await anext(stream))
        worker.line.send(says("one two")(request))
        chunks += [chunk async for chunk in stream]
        *told, last, counted = chunks
        assert [chunk.choices[0].delta.content for chunk in told] == ["on", "e", " two"]
        assert [len(chunk.choices[0].logprobs.content) for chunk in told] == [2, 1, 4]
        assert {chunk.system_fingerprint for chunk in chunks} == {"qwen@5"}
        assert [chunk.choices[0].finish_reason for chunk in (*told, last)] == [None, None, None, "stop"]
        assert (counted.choices, counted.usage.completion_tokens, counted.usage.prompt_tokens) == ([], 7, 4)
        assert (rig.desk.counts["requests"], rig.desk.counts["answers"], rig.desk.num_waiting) == (1, 1, 0)

    run(tmp_path, script)


def test_several_answers_grow_beside_each_other(tmp_path):
    """Each by its index; one that had no piece comes at its end; calls come whole."""

    async def script(rig, _):
        worker = await rig.worker(silent)
        opening = asyncio.ensure_future(
            rig.client.chat.completions.create(model="qwen", messages=TALK, tools=[ADD], n=2, stream=True)
        )
        await asked_of(worker, 2)
        one, two = sorted(worker.asked, key=lambda asked: asked.request_id)
        worker.line.send(piece(one, "a"))
        stream = await opening
        chunks = [await anext(stream)]
        worker.line.send(says("bc", is_cut=True)(two))
        worker.line.send(says("ab", tool_calls=(ToolCall("add", '{"a":1}'),))(one))
        chunks += [chunk async for chunk in stream]
        fingerprints, found = {chunk.system_fingerprint for chunk in chunks}, [chunk.choices[0] for chunk in chunks]
        said = ["".join(choice.delta.content or "" for choice in found if choice.index == index) for index in (0, 1)]
        assert said == ["ab", "bc"]
        (call,) = [call for choice in found for call in choice.delta.tool_calls or ()]
        assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a":1}')
        ends = {choice.index: choice.finish_reason for choice in found if choice.finish_reason}
        assert fingerprints == {"qwen@5"}, "nothing is said of an answer before its first piece"
        assert ends == {0: "tool_calls", 1: "length"}

    run(tmp_path, script)


def test_completions_and_token_ids_stream_too(tmp_path):
    """As OpenAI's older form and vLLM's have them; offsets count on; with echo all comes at the end."""

    async def script(rig, http):
        worker = await rig.worker(silent)
        opening = asyncio.ensure_future(
            rig.client.completions.create(model="qwen", prompt="1", logprobs=1, stream=True)
        )
        request = await asked_of(worker)
        worker.line.send(piece(request, "on"))
        stream = await opening
        first = (await anext(stream)).choices[0]
        worker.line.send(says("one")(request))
        rest = [chunk.choices[0] async for chunk in stream]
        assert [choice.text for choice in (first, *rest)] == ["on", "e", ""]
        assert (first.logprobs.text_offset, rest[0].logprobs.text_offset) == ([0, 1], [2])
        assert rest[-1].finish_reason == "stop"

        worker.answer = says("e", given=(TokenLogprob(1, b"a"), TokenLogprob(2, b"b", -2.0, b"c", -1.0)))
        echoed = await rig.client.completions.create(model="qwen", prompt="ab", echo=True, logprobs=1, stream=True)
        choices = [chunk.choices[0] async for chunk in echoed]
        assert [choice.text for choice in choices] == ["abe", ""]
        assert choices[0].logprobs.token_logprobs == [None, -2.0, -0.5]
        assert [asked.streams for asked in worker.asked] == [True, False]
        worker.answer = says("e")
        several = await rig.client.completions.create(model="qwen", prompt=["a", "b"], n=2, stream=True)
        assert sorted([chunk.choices[0].index async for chunk in several]) == [0, 0, 1, 1, 2, 2, 3, 3]

        worker.answer = lambda request: piece(request, "x")
        body = {"model": "qwen", "token_ids": [4], "stream": True, "sampling_params": {"max_tokens": 2}}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with http.post(f"{rig.root}/inference/v1/generate", json=body, headers=headers) as answer:
            lines = [await anext(aiter(answer.content))]
            worker.line.send(says("xyz", is_cut=True)(worker.asked[-1]))
            lines += [line async for line in answer.content if line.strip()]
        told = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
        assert [(one["token_ids"], one["finish_reason"]) for one in told] == [([65], None), ([66, 67], "length")]
        contents = [[(one["token_id"], one["token"]) for one in choice["logprobs"]["content"]] for choice in told]
        assert contents == [[(65, "token_id:65")], [(66, "token_id:66"), (67, "token_id:67")]]
        assert lines[-1].strip() == b"data: [DONE]"

    run(tmp_path, script)


@pytest.mark.parametrize("body", [{"messages": TALK}, {"prompt": "1"}])
def test_a_refusal_before_the_first_piece_is_an_answer_of_its_own_and_later_the_last_event(tmp_path, body):
    """A worker that is lost in the middle cannot be replaced: what was said is said. Before, another one answers."""

    async def script(rig, http):
        worker = await rig.worker(silent)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        refused = asyncio.ensure_future(rig.post(http, path, {"model": "qwen", "stream": True, "n": 2} | body))
        request = await asked_of(worker, 2)
        worker.line.send(DirectRefusal(request.request_id, "invalid_request", "prompt: none"))
        status, found = await refused
        assert (status, found["error"]["message"]) == (400, "prompt: none")
        assert (rig.desk.counts["requests"], rig.registry.counts["refused/invalid_request"]) == (0, 1)
        worker.asked.clear()

        opening = asyncio.ensure_future(rig.client.completions.create(model="qwen", prompt="1", stream=True))
        worker.line.send(DirectRefusal((await asked_of(worker, 1)).request_id, LOST, "its engine died"))
        request = await asked_of(worker, 2)
        worker.line.send(piece(request, "a"))
        stream = await opening
        assert (await anext(stream)).choices[0].text == "a"
        worker.line.send(DirectRefusal(request.request_id, LOST, "its engine died"))
        with pytest.raises(openai.APIError, match="lost in the middle of the answer: its engine died"):
            await anext(stream)
        assert (len(worker.asked), rig.desk.num_waiting) == (2, 0)

    run(tmp_path, lambda *site: asyncio.wait_for(script(*site), 30))


def test_a_version_that_is_passed_in_the_middle_ends_a_stream_of_one_version(tmp_path):
    """And its request is withdrawn; without a version in the name, the fingerprint tells."""

    async def script(rig, _):
        worker = await rig.worker(silent)
        opening = asyncio.ensure_future(rig.client.completions.create(model="qwen@5", prompt="1", stream=True))
        request = await asked_of(worker)
        worker.line.send(piece(request, "a"))
        stream = await opening
        await anext(stream)
        worker.line.send(piece(request, "b", version=6))
        with pytest.raises(openai.APIError, match="qwen was updated to qwen@6 during the answer"):
            await anext(stream)
        await until(lambda: request.request_id in worker.withdrawn)

        worker.answer = lambda request: piece(request, "a", version=5)
        stream = await rig.client.completions.create(model="qwen", prompt="1", stream=True)
        worker.line.send(piece(worker.asked[-1], "b", version=6))
        told = [await anext(stream), await anext(stream)]
        assert [(chunk.choices[0].text, chunk.system_fingerprint) for chunk in told] == [
            ("a", "qwen@5"),
            ("b", "qwen@6"),
        ]
        await stream.close()

    run(tmp_path, script)


def test_pieces_that_come_faster_than_a_line_takes_them_arrive_in_order(tmp_path):
    """None is left behind, whichever comes last."""
    texts = [f"{number} " for number in range(500)]

    async def script(rig, _):
        worker = await rig.worker(silent)
        opening = asyncio.ensure_future(rig.client.completions.create(model="qwen", prompt="1", stream=True))
        request = await asked_of(worker)
        for text in texts:
            worker.line.send(piece(request, text))
        stream = await opening
        said = ""
        while said != "".join(texts):
            said += (await anext(stream)).choices[0].text
            assert "".join(texts).startswith(said)
        await stream.close()

    run(tmp_path, lambda *site: asyncio.wait_for(script(*site), 30))


def test_a_client_that_hangs_up_in_the_middle_has_its_request_withdrawn(tmp_path):
    """The engine need not go on for nobody."""

    async def script(rig, _):
        worker = await rig.worker(lambda request: piece(request, "a"))
        stream = await rig.client.completions.create(model="qwen", prompt="1", stream=True)
        await anext(stream)
        assert worker.withdrawn == []
        await stream.close()
        await until(lambda: worker.asked[0].request_id in worker.withdrawn)
        assert rig.desk.num_waiting == 0

    run(tmp_path, script)


def test_a_client_that_takes_nothing_is_hung_up_on_and_holds_nothing(tmp_path, monkeypatch):
    """Its pieces are merged while it stalls; then its request is withdrawn."""
    monkeypatch.setattr(direct_stream, "STALL_S", 5.0)  # in which most pieces come
    growing, sent, send = [], [0], direct_stream._send
    monkeypatch.setattr(
        direct_stream, "_send", lambda request, stream, data: sent.append(len(data)) or send(request, stream, data)
    )
    monkeypatch.setattr(
        direct_stream,
        "StreamedAnswer",
        lambda index, kind=direct_stream.StreamedAnswer: growing.append(kind(index)) or growing[-1],
    )

    async def script(rig, _):
        worker = await rig.worker(silent)
        host, port = rig.root.removeprefix("http://").split(":")
        body = json.dumps({"model": "qwen", "prompt": "1", "stream": True})
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        request = await asked_of(worker)
        reader._transport.pause_reading()
        for _ in range(200):  # far more than sockets take
            worker.line.send(DirectChunk(request_id=request.request_id, version=5, text="x" * 100_000))
        await until(lambda: request.request_id in worker.withdrawn)
        assert rig.desk.num_waiting == 0
        assert max(*sent, len(growing[0].text)) > 1_000_000, "merged, and not in a queue of chunks"
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    run(tmp_path, script)


def test_a_client_that_takes_slowly_is_not_hung_up_on(tmp_path, monkeypatch):
    """However much is merged while it does."""
    monkeypatch.setattr(direct_stream, "STALL_S", stall_s := 4.0)

    async def script(rig, http):
        worker = await rig.worker(silent)
        body, headers = {"model": "qwen", "prompt": "1", "stream": True}, {"Authorization": f"Bearer {KEY}"}
        asking = asyncio.ensure_future(http.post(f"{rig.root}/v1/completions", json=body, headers=headers))
        request = await asked_of(worker)
        for _ in range(6):
            worker.line.send(DirectChunk(request_id=request.request_id, version=5, text="x" * 5_000_000))
        async with await asking as answer:
            begun_s, num_taken = time.monotonic(), 0
            while time.monotonic() - begun_s < 1.5 * stall_s:
                num_taken += len(await answer.content.readexactly(1 << 20))
                await asyncio.sleep(stall_s / 10)
            assert num_taken < 30_000_000
            worker.line.send(says()(request))
            async for data in answer.content.iter_any():
                num_taken += len(data)
        assert (num_taken > 30_000_000, worker.withdrawn) == (True, [])

    run(tmp_path, script)
