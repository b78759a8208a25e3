"""HTTP routes of requests outside of episodes, and the WebSocket of rollout workers, which answer them.

POST /v1/chat/completions            conversations
POST /v1/completions                 text or token ids
POST /inference/v1/generate          token ids, as vLLM takes them
GET  /worker                         WebSocket of a rollout worker

These are the POST routes under the run's key; under a session's key they give turns of that session (see `routes`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog
from aiohttp import WSMsgType, web

from mrl.gateway.chat_wire import ChatRefusal
from mrl.gateway.direct_queue import VERSION_MARK, DirectRequestQueue
from mrl.gateway.direct_stream import (
    Choices,
    StreamedAnswer,
    chat_choices,
    completion_choices,
    generate_choices,
    stream_answers,
)
from mrl.gateway.direct_wire import (
    DirectCall,
    chat_answer,
    completion_answer,
    generate_answer,
    read_completion,
    read_direct_chat,
    read_generate,
)
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.direct_requests import DirectAnswer, TurnChunk, direct_message, read_worker

OF_CHAT_CHUNK = {"object": "chat.completion.chunk"}
log = structlog.get_logger()


class DirectRoutes:
    """Answers requests outside of episodes by means of a DirectRequestQueue; without a desk, refuses them all."""

    def __init__(self, desk: DirectRequestQueue | None) -> None:
        self._desk = desk

    def kept(self, policies: Sequence[str]) -> list[str]:
        """Model names, such as `qwen@120`, of the earlier versions that clients can ask for."""
        desk = self._desk
        return [f"{name}{VERSION_MARK}{step}" for name in policies for step in desk.kept.steps(name)] if desk else []

    async def answer(self, request: web.Request, body: Mapping[str, Any], form: "DirectFormat") -> web.StreamResponse:
        """Answer one HTTP request of the route that `form` describes. Raises ChatRefusal."""
        desk, call = self._need(), form.read(body)
        call_id = call.requests[0].request_id.partition("-")[0]
        policy, step = desk.model(call.model)
        asking = [partial(desk.ask, policy, step, one) for one in call.requests]
        created = {"created": int(time.time()), "model": call.model}

        def head(version: int) -> dict[str, Any]:
            return created | {"system_fingerprint": f"{policy}{VERSION_MARK}{version}"}

        if call.is_streamed:
            named = {form.id_key: call_id} | form.of_chunk
            found = await stream_answers(
                request,
                asking,
                wording=partial(form.wording, call, call_id),
                head=lambda version: named | head(version),
                includes_usage=call.includes_usage,
            )
        else:
            answers = await _all(asking)
            newest = max(answer.version for answer in answers)
            found = web.json_response(form.whole(call_id, call, answers, head(newest)))
        desk.counts["requests"] += 1
        return found

    async def serve_worker(self, request: web.Request, on_turn: Callable[[TurnChunk], None]) -> web.WebSocketResponse:
        """Serve the WebSocket of one worker until it hangs up; `on_turn` takes the pieces of turns of episodes."""
        desk = self._desk
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=30.0)
        await socket.prepare(request)
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        worker = desk and desk.join(lambda message: outgoing.put_nowait(direct_message(message)))
        sending = asyncio.ensure_future(_send(socket, outgoing))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                said = read_worker(message.data)
                if isinstance(said, TurnChunk):
                    on_turn(said)
                elif desk and worker:
                    desk.hear(worker, said)
        except msgspec.DecodeError:
            log.warning("malformed message from a worker; closing its connection")
        finally:
            sending.cancel()
            if desk and worker:
                desk.leave(worker)
        return socket

    def _need(self) -> DirectRequestQueue:
        if self._desk is None:
            raise ChatRefusal(
                "the run's key does not belong to an episode: get a session's key from POST /v1/sessions, or set "
                "gateway.serve = true so that the run answers requests outside of episodes",
                code="no_session",
            )
        return self._desk


@dataclass(frozen=True)
class DirectFormat:
    """How the requests of one route are read, and how its answers are written."""

    read: Callable[[Mapping[str, Any]], DirectCall]
    """Body of a request -> call."""
    whole: Callable[[str, DirectCall, Sequence[DirectAnswer], Mapping[str, Any]], Mapping[str, Any]]
    """(Id of a call, call, answers, keys of the head) -> JSON body with all answers."""
    wording: Callable[[DirectCall, str, StreamedAnswer], Choices]
    """(Call, id of the call, one of its answers) -> choices of the next chunks of a stream."""
    of_chunk: dict[str, str]
    """Keys with fixed values in every chunk of a stream."""
    id_key: str = "id"
    """Key of the call's id in a chunk."""


CHAT = DirectFormat(
    read_direct_chat,
    chat_answer,
    lambda call, call_id, one: chat_choices(call_id, one, wants_logprobs=call.wants_logprobs),
    OF_CHAT_CHUNK,
)
COMPLETIONS = DirectFormat(
    read_completion,
    completion_answer,
    lambda call, _, one: completion_choices(call, one),
    {"object": "text_completion"},
)
GENERATE = DirectFormat(read_generate, generate_answer, lambda _, __, one: generate_choices(one), {}, "request_id")


async def _all(asking: Sequence[Callable[[], Awaitable[DirectAnswer]]]) -> list[DirectAnswer]:
    """Return all answers in the order of `asking`; when one is refused, the other requests are withdrawn."""
    tasks = [asyncio.ensure_future(ask()) for ask in asking]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for one in tasks:
            one.cancel()


async def _send(socket: web.WebSocketResponse, outgoing: "asyncio.Queue[bytes]") -> None:
    try:
        with suppress(ConnectionError):  # the worker is gone, which the loop in `serve_worker` sees
            while True:
                await socket.send_bytes(await outgoing.get())
    finally:
        await socket.close()  # a connection that only receives would keep its worker's requests for good
