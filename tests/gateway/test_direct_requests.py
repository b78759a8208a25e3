"""Requests outside of episodes through the gateway: a real server, the openai package, workers' real lines."""

import asyncio
import json
import re
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from mrl.files import replace_file
from mrl.gateway import direct_queue, direct_wire
from mrl.gateway.checkpoint_servers import CheckpointServers
from mrl.gateway.direct_queue import DirectRequestQueue
from mrl.gateway.gateway_connection import GatewayConnection
from mrl.gateway.routes import Gateway
from mrl.gateway.session_registry import SessionRegistry
from mrl.records.direct_requests import (
    LOST,
    DirectAnswer,
    DirectRefusal,
    TokenLogprob,
    WithdrawnRequest,
    WorkerRoom,
    direct_message,
)
from mrl.records.episodes import Message, ToolCall
from mrl.tasks.environments.gateway_location import ENDPOINT, SEAT_KEY
from mrl.transport.endpoints import publish_endpoint

KEY, OF_SEATS = "mrl-agents", "mrl-seats"
TALK = [{"role": "user", "content": "1 + 2?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def until(condition):
    """Lines are other threads' business; the test has a limit against hangs."""
    while not condition():
        await asyncio.sleep(0.005)


class Worker:
    """One at the other end of a real line, which answers by a function of a request; None: not at all."""

    def __init__(self, folder, answer, *, policy="qwen", room=8, version=5):
        self.woken = threading.Semaphore(0)
        self.line = GatewayConnection(folder)
        self.line.on_heard = self.woken.release
        self.answer, self.room = answer, WorkerRoom(policy, room, version)
        self.asked, self.withdrawn = [], []
        self.line.send(self.room)
        self.serving = asyncio.ensure_future(self.serve())

    async def serve(self):
        """Until it is cancelled."""
        while True:
            for message in self.line.take():
                if isinstance(message, WithdrawnRequest):
                    self.withdrawn.append(message.request_id)
                    continue
                self.asked.append(message)
                if (answer := self.answer(message)) is not None:
                    self.line.send(answer)
            await asyncio.sleep(0.005)

    def close(self):
        """Its end."""
        self.serving.cancel()
        self.line.close()


def says(text="3", **more):
    """Answers with this text."""

    def answer(request):
        sampled = tuple(TokenLogprob(65 + place, letter.encode(), -0.5) for place, letter in enumerate(text))
        more_here = {"version": 5, "num_given_tokens": 4, "sampled": sampled} | more
        return DirectAnswer(request_id=request.request_id, text=text, **more_here)

    return answer


class Rig:
    """A gateway on loopback with its desk, and workers."""

    def __init__(self, folder, root, desk, registry, checkpoints):
        self.folder, self.root, self.desk, self.registry, self.workers = folder, root, desk, registry, []
        self.checkpoints = checkpoints
        self.client = AsyncOpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0)

    async def worker(self, answer, **options):
        """One that is there."""
        self.workers.append(Worker(self.folder, answer, **options))
        wanted = self.workers[-1].room
        await until(lambda: any(one.room == wanted for one in self.desk._workers))
        return self.workers[-1]

    async def post(self, http, path, body, key=KEY):
        """Status and answer."""
        async with http.post(self.root + path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def serving(folder, *, serves=True, kept_versions=0, process=()):
    """A rig; the words of `process`, with those of a policy and a step behind, are what serves a kept version."""
    registry, checkpoints = SessionRegistry(idle_s=60.0), {"qwen": [40, 80, 120], "llama": []}
    kept = CheckpointServers(
        Path("runs/my run") if not kept_versions else folder / "run",
        checkpoints.__getitem__,
        most=kept_versions,
        start=lambda policy, step: ((sys.executable, *process, policy, str(step)), {}),
    )
    desk = DirectRequestQueue(["qwen", "llama"], kept)
    policies = ["qwen", "llama"]
    server = Gateway(
        registry, policies=policies, key=KEY, seat_key=OF_SEATS, max_body_bytes=1 << 20, desk=desk if serves else None
    )
    runner = server.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    publish_endpoint(folder / "endpoints", ENDPOINT, f"tcp://127.0.0.1:{port}")
    (folder / "keys").mkdir(exist_ok=True)
    replace_file(folder / "keys" / SEAT_KEY, OF_SEATS.encode())
    rig = Rig(folder, f"http://127.0.0.1:{port}", desk, registry, checkpoints)
    try:
        yield rig
    finally:
        for worker in rig.workers:
            await asyncio.to_thread(worker.close)
        await rig.client.close()
        await asyncio.to_thread(kept.close)
        await runner.cleanup()


def run(folder, script, **options):
    """What an async function of (rig, http) returns."""

    async def whole():
        async with serving(folder, **options) as rig, aiohttp.ClientSession() as http:
            return await script(rig, http)

    return asyncio.run(whole())


def test_a_chat_is_answered_by_a_worker_of_the_policy(tmp_path):
    """What it asks reaches the worker; text, calls, log-probabilities and usage come back, streamed too."""

    async def script(rig, _):
        calls = (ToolCall("add", '{"a":1}'),)
        await rig.worker(says("other"), policy="llama")
        worker = await rig.worker(says("3", tool_calls=calls))
        found = await rig.client.chat.completions.create(
            model="qwen",
            messages=TALK,
            tools=[ADD],
            n=2,
            seed=7,
            temperature=0.5,
            max_tokens=9,
            stop="x",
            logprobs=True,
        )
        one, two = found.choices
        assert (one.message.content, one.message.tool_calls[0].function.arguments) == ("3", '{"a":1}')
        assert (one.finish_reason, two.index, found.usage.total_tokens) == ("tool_calls", 1, 10)
        assert [(token.token, token.logprob) for token in one.logprobs.content] == [("3", -0.5)]
        assert found.system_fingerprint == "qwen@5"
        first, second = worker.asked
        assert (first.messages, first.temperature, first.max_new_tokens, first.stop) == (
            (Message("user", "1 + 2?"),),
            0.5,
            9,
            ("x",),
        )
        assert json.loads(first.tools[0])["function"]["name"] == "add"
        assert first.seed != second.seed
        await rig.client.chat.completions.create(model="qwen@5", messages=TALK, seed=7)
        assert worker.asked[2].seed == first.seed, "the same seed, the same answer"
        stream = await rig.client.chat.completions.create(model="qwen", messages=TALK, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "3"
        assert (rig.desk.counts["requests"], rig.desk.counts["answers"]) == (3, 4)

    run(tmp_path, script)


def test_given_text_is_scored_as_harnesses_ask_for_it(tmp_path):
    """`echo` with `logprobs`, a batch of token ids: tokens, their log-probabilities, and the likeliest ones."""
    given = (TokenLogprob(1, b"a"), TokenLogprob(2, b"b", -2.0, b"c", -1.0), TokenLogprob(3, b"d", -0.5, b"d", -0.5))

    async def script(rig, _):
        worker = await rig.worker(says("e", given=given, is_cut=True))
        found = await rig.client.completions.create(
            model="qwen", prompt=[[1, 2, 3], [4]], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        assert [(one.index, one.text, one.finish_reason) for one in found.choices] == [
            (0, "abde", "length"),
            (1, "abde", "length"),
        ]
        logprobs = found.choices[0].logprobs
        assert logprobs.token_logprobs == [None, -2.0, -0.5, -0.5]
        assert logprobs.top_logprobs == [None, {"b": -2.0, "c": -1.0}, {"d": -0.5}, None]
        assert (logprobs.text_offset, logprobs.tokens) == ([0, 1, 2, 3], ["a", "b", "d", "e"])
        assert [(one.token_ids, one.scores_given, one.max_new_tokens) for one in worker.asked] == [
            ((1, 2, 3), True, 1),
            ((4,), True, 1),
        ]
        assert rig.desk.counts["scored_tokens"] == 4

    run(tmp_path, script)


def test_token_ids_go_in_and_out(tmp_path):
    """As vLLM's own route has it."""

    async def script(rig, http):
        worker = await rig.worker(says("ab"))
        body = {"model": "qwen", "token_ids": [4, 5], "sampling_params": {"max_tokens": 2, "temperature": 0}}
        status, found = await rig.post(http, "/inference/v1/generate", body)
        assert (status, found["choices"][0]["token_ids"], worker.asked[0].token_ids) == (200, [65, 66], (4, 5))
        assert [one["logprob"] for one in found["choices"][0]["logprobs"]["content"]] == [-0.5, -0.5]

    run(tmp_path, script)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            "chat/completions",
            {"messages": TALK, "presence_penalty": 1},
            "presence_penalty = 1: not supported by the engines of a run; omit presence_penalty",
        ),
        ("chat/completions", {"messages": TALK, "response_format": {"type": "json_object"}}, "response_format = "),
        ("chat/completions", {"messages": TALK, "top_logprobs": 5}, "top_logprobs = 5"),
        ("chat/completions", {"messages": TALK, "temperature": -1}, "temperature -1: wanted 0 to 100"),
        ("chat/completions", {"messages": TALK, "max_tokens": 0}, "max_tokens 0: wanted an integer, 1 or more"),
        ("chat/completions", {"messages": TALK, "n": 1000}, "n 1000: wanted"),
        ("chat/completions", {"messages": []}, "messages: wanted a list"),
        ("chat/completions", {"messages": TALK, "seed": "x"}, "seed 'x': wanted an integer"),
        ("completions", {"prompt": "a", "logprobs": 5}, "logprobs = 5: at most 1"),
        ("completions", {"prompt": [1, -1]}, "prompt: wanted a string, a list of token ids"),
        ("completions", {"prompt": ["a"] * 20, "n": 20}, "400 answers in one request; at most 256"),
        ("completions", {"prompt": "a", "stop": [1]}, "stop: wanted a string, or a list of at most 64"),
        ("completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids [-1]: wanted at most 64 ids"),
        ("completions", {"prompt": "a", "echo": "yes"}, "echo 'yes': wanted true or false"),
        ("completions", {"prompt": "a", "stream": 1}, "stream 1: wanted true or false"),
        (
            "completions",
            {"prompt": "a", "stream_options": {}},
            "wanted an object, and only together with stream = true",
        ),
        ("completions", {"prompt": "a", "stream": True, "stream_options": 1}, "stream_options: wanted an object"),
        (
            "completions",
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
            "include_usage 1: wanted true or false",
        ),
        ("chat/completions", {"messages": TALK, "logprobs": 1}, "logprobs 1: wanted true or false"),
        (
            "completions",
            {"prompt": ["a", "\ud800"]},
            "prompt or stop: not valid UTF-8 (it has an unpaired surrogate)",
        ),
        ("completions", {"prompt": "a", "stop": "\ud800"}, "prompt or stop: not valid UTF-8"),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "it has an unpaired surrogate"),
    ],
)
def test_what_no_engine_does_is_refused_in_one_line(tmp_path, path, body, words):
    """Before any worker hears of it."""

    async def script(rig, http):
        worker = await rig.worker(says())
        status, found = await rig.post(http, f"/v1/{path}", {"model": "qwen"} | body)
        assert (status, worker.asked) == (400, [])
        assert words in found["error"]["message"]

    run(tmp_path, script)


def test_what_a_workers_line_cannot_carry_is_told_before_any_worker_hears_of_it(tmp_path, monkeypatch):
    """413 with the bound; what just fits is answered."""
    body = {"model": "qwen", "prompt": "a" * 500}

    async def script(rig, http):
        worker = await rig.worker(says())
        assert (await rig.post(http, "/v1/completions", body))[0] == 200
        (request,) = worker.asked
        size = len(direct_message(request)) - len("-1")
        monkeypatch.setattr(direct_wire, "MAX_REQUEST_BYTES", size - 1)
        status, found = await rig.post(http, "/v1/completions", body | {"seed": request.seed})
        assert (status, found["error"]["code"], len(worker.asked)) == (413, "too_long", 1)
        assert f"{size:,} bytes together; at most {size - 1:,}" in found["error"]["message"]

    run(tmp_path, script)


def test_a_worker_is_woken_by_each_thing_that_comes(tmp_path):
    """It may be waiting for its engine, or for other work."""

    async def script(rig, http):
        worker = await rig.worker(says())
        for _ in range(3):
            assert (await rig.post(http, "/v1/completions", {"model": "qwen", "prompt": "1"}))[0] == 200
        assert [worker.woken.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]

    run(tmp_path, script)


def test_a_line_that_cannot_be_spoken_to_is_hung_up(tmp_path, monkeypatch):
    """Whatever went wrong: the worker's requests go to others, and it calls anew."""

    async def script(rig, _):
        send = web.WebSocketResponse.send_bytes

        async def broken(socket, message, *more):
            monkeypatch.setattr(web.WebSocketResponse, "send_bytes", send)
            raise ValueError("none of the errors of a line")

        monkeypatch.setattr(web.WebSocketResponse, "send_bytes", broken)
        await rig.worker(says(), room=1)
        found = await rig.client.chat.completions.create(model="qwen", messages=TALK, timeout=20)
        assert (found.choices[0].message.content, rig.desk.counts["tried_again"]) == ("3", 1)

    run(tmp_path, script)


@pytest.mark.parametrize(("limits", "limit"), [({"max_completion_tokens": None}, 7), ({"max_completion_tokens": 3}, 3)])
def test_the_newer_name_of_the_limit_counts_where_it_says_one(tmp_path, limits, limit):
    """A null says nothing."""

    async def script(rig, http):
        worker = await rig.worker(says())
        body = {"model": "qwen", "messages": TALK, "max_tokens": 7} | limits
        await rig.post(http, "/v1/chat/completions", body)
        assert worker.asked[0].max_new_tokens == limit

    run(tmp_path, script)


@pytest.mark.parametrize(("temperature", "sampled_at"), [(1e-38, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (None, None)])
def test_a_temperature_that_no_logit_can_be_divided_by_is_0(tmp_path, temperature, sampled_at):
    """Else log-probabilities would be NaN."""

    async def script(rig, http):
        worker = await rig.worker(says())
        await rig.post(http, "/v1/completions", {"model": "qwen", "prompt": "a", "temperature": temperature})
        assert worker.asked[0].temperature == sampled_at

    run(tmp_path, script)


def test_tokens_that_are_no_whole_text_are_named_by_their_bytes(tmp_path):
    """Two of them would read alike, and stand in one place."""
    given = (TokenLogprob(1, b"a"), TokenLogprob(2, b"\xe4", -2.0, b"\xe5\x0a", -1.0), TokenLogprob(3, b"\xbd\xa0"))

    async def script(rig, _):
        await rig.worker(says("", given=given))
        found = await rig.client.completions.create(model="qwen", prompt="a", echo=True, logprobs=1, max_tokens=0)
        logprobs = found.choices[0].logprobs
        assert logprobs.top_logprobs[1] == {"bytes:\\xe4": -2.0, "bytes:\\xe5\\x0a": -1.0}
        assert logprobs.tokens[:2] == ["a", "bytes:\\xe4"]

    run(tmp_path, script)


THERE_ARE = "is not served; available: qwen (now qwen@5), llama (now starting)"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt", THERE_ARE),
        ("qwen@4", THERE_ARE),
        ("llama@5", THERE_ARE),
        ("qwen@x", THERE_ARE),
        ("qwen@40", "mrl export 'runs/my run' --policy qwen --step 40` writes one"),
        (
            "qwen@95",
            "checkpoints of qwen exist for step 40, 80, 120: `mrl export 'runs/my run' --policy qwen --step 80`",
        ),
        ("qwen@95", "`mrl eval 'runs/my run'@80 --policy qwen` evaluates it"),
        ("qwen@", "--policy qwen --step 120` writes one"),
        ("qwen@" + "9" * 5000, "--step 120`"),
        ("llama@5", "other versions are not served; llama has no checkpoint yet"),
    ],
)
def test_whoever_wants_a_version_that_is_not_served_is_told_which_are_kept(tmp_path, model, words):
    """With the commands for the one that is wanted, or the nearest, and what is served now."""

    async def script(rig, _):
        await rig.worker(says())
        with pytest.raises(openai.NotFoundError, match=re.escape(words)):
            await rig.client.chat.completions.create(model=model, messages=TALK)

    run(tmp_path, script)


def test_a_version_that_is_passed_while_it_answers_is_no_answer(tmp_path):
    """Whoever asks for one version does not get another."""

    async def script(rig, _):
        await rig.worker(says(version=6))
        with pytest.raises(openai.ConflictError, match=r"qwen was updated to qwen@6 during the answer; .*--step 40`"):
            await rig.client.chat.completions.create(model="qwen@5", messages=TALK)

    run(tmp_path, script)


def test_a_version_that_is_passed_while_a_request_waits_is_told_at_once(tmp_path):
    """As long as one worker has it, or none has another one, it waits."""

    async def script(rig, _):
        one, other = [await rig.worker(lambda request: None, room=room) for room in (0, 1)]
        busy = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen", messages=TALK))
        await until(lambda: other.asked)
        waiting = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen@5", messages=TALK))
        await until(lambda: rig.desk.num_waiting == 2)
        for worker, room in ((one, WorkerRoom("qwen", 0, 6)), (other, WorkerRoom("qwen", 0, 5))):
            worker.line.send(room)
            await until(lambda room=room: any(one.room == room for one in rig.desk._workers))
        assert not waiting.done()
        assert rig.desk.num_waiting == 2
        other.line.send(WorkerRoom("qwen", 0, 7))
        with pytest.raises(
            openai.ConflictError, match="qwen was updated to qwen@6 and qwen@7 while the request waited"
        ):
            await waiting
        assert rig.desk.num_waiting == 1
        busy.cancel()

    run(tmp_path, lambda *site: asyncio.wait_for(script(*site), 15))


def test_a_request_of_a_lost_worker_goes_to_another_one(tmp_path):
    """One that hangs up, and one that has lost its engine; the client sees nothing of it."""

    async def script(rig, _):
        silent = await rig.worker(lambda request: None, room=100)
        asking = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen", messages=TALK))
        await until(lambda: silent.asked)

        def gives_back(request):
            lost.line.send(WorkerRoom("qwen", 0, None))
            return DirectRefusal(request.request_id, LOST, "its engine died")

        lost = await rig.worker(gives_back, room=50)
        good = await rig.worker(says("3"), room=1)
        await asyncio.to_thread(silent.close)
        assert (await asking).choices[0].message.content == "3"
        assert (len(lost.asked), len(good.asked), rig.desk.counts["tried_again"]) == (1, 1, 2)

    run(tmp_path, script)


def test_workers_that_are_lost_again_and_again_are_an_error(tmp_path):
    """503 after three tries."""

    async def script(rig, _):
        worker = await rig.worker(lambda request: DirectRefusal(request.request_id, LOST, "its engine died"))
        with pytest.raises(openai.InternalServerError, match="the worker was lost 3 times: its engine died"):
            await rig.client.chat.completions.create(model="qwen", messages=TALK)
        assert len({one.request_id for one in worker.asked}) == 3

    run(tmp_path, script)


def test_a_client_that_hangs_up_has_its_request_withdrawn(tmp_path):
    """The worker hears of it, and its place is free."""

    async def script(rig, _):
        worker = await rig.worker(lambda request: None)
        asking = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen", messages=TALK))
        await until(lambda: worker.asked)
        asking.cancel()
        await until(lambda: worker.asked[0].request_id in worker.withdrawn)
        assert rig.desk.num_waiting == 0

    run(tmp_path, script)


def test_a_worker_gets_no_more_than_it_has_room_for(tmp_path):
    """The rest waits, and goes out as answers come."""

    async def script(rig, http):
        answers = []
        worker = await rig.worker(lambda request: answers.append(request), room=2)
        body = {"model": "qwen", "prompt": ["a", "b", "c"]}
        asking = asyncio.ensure_future(rig.post(http, "/v1/completions", body))
        await until(lambda: len(worker.asked) == 2)
        assert (len(worker.asked), rig.desk.num_waiting) == (2, 3)
        worker.line.send(says("x")(worker.asked[1]))
        await until(lambda: len(worker.asked) == 3)
        for request, text in ((worker.asked[0], "0"), (worker.asked[2], "2")):
            worker.line.send(says(text)(request))
        _, found = await asking
        assert [choice["text"] for choice in found["choices"]] == ["0", "x", "2"]

    run(tmp_path, script)


def test_bounds_of_time_and_number(tmp_path, monkeypatch):
    """Without a worker, without room at one, and too many at once: each is told. What a worker has may take long."""
    now_s = [0.0]

    async def script(rig, _):
        rig.desk._clock = lambda: now_s[0]
        rig.desk._seen_s = dict.fromkeys(rig.desk._seen_s, 0.0)
        alone = asyncio.ensure_future(rig.client.chat.completions.create(model="llama", messages=TALK))
        worker = await rig.worker(lambda request: None, room=1)
        slow = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen", messages=TALK))
        await until(lambda: worker.asked)
        crowded = asyncio.ensure_future(rig.client.chat.completions.create(model="qwen", messages=TALK))
        await until(lambda: rig.desk.num_waiting == 3)
        monkeypatch.setattr(direct_queue, "MAX_PENDING", 3)
        with pytest.raises(openai.RateLimitError, match="try again later"):
            await rig.client.chat.completions.create(model="qwen", messages=TALK)
        now_s[0] = direct_queue.NO_WORKER_S + 1
        rig.desk.tend()
        with pytest.raises(openai.InternalServerError, match="no worker of llama is connected"):
            await alone
        now_s[0] = direct_queue.ROOM_S + 1
        rig.desk.tend()
        with pytest.raises(openai.InternalServerError, match="no worker of qwen had room within 600 s"):
            await crowded
        worker.line.send(WorkerRoom("qwen", 0, 5))
        worker.line.send(DirectRefusal(worker.asked[0].request_id, LOST, "its engine is lost"))
        await until(lambda: rig.desk.counts["tried_again"])
        rig.desk.tend()  # it waits since now
        worker.line.send(WorkerRoom("qwen", 1, 5))
        await until(lambda: len(worker.asked) == 2)
        worker.line.send(says("long")(worker.asked[1]))
        assert (await slow).choices[0].message.content == "long"

    run(tmp_path, script)


def test_where_the_run_does_not_serve_a_client_is_told_the_key(tmp_path):
    """And a session's key opens none of these doors."""

    async def script(rig, http):
        status, found = await rig.post(http, "/v1/completions", {"model": "qwen", "prompt": "a"})
        assert (status, found["error"]["code"]) == (400, "no_session")
        assert "gateway.serve = true" in found["error"]["message"]
        status, _ = await rig.post(http, "/v1/completions", {"model": "qwen", "prompt": "a"}, key="wrong")
        assert status == 401
        async with http.get(f"{rig.root}/worker", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status == 401

    run(tmp_path, script, serves=False)
