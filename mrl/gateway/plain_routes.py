"""HTTP routes of requests outside of episodes, and the line of a rollout worker that answers them.

POST /v1/chat/completions            under the run's key; under a session's it is that session's
POST /v1/completions                 text or token ids
POST /inference/v1/generate          token ids, as vLLM takes them
GET  /worker                         WebSocket of a rollout worker
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from aiohttp import WSMsgType, web

from mrl.gateway.chat_wire import ChatMistake, chunks
from mrl.gateway.plain_desk import VERSION_MARK, PlainDesk
from mrl.gateway.plain_wire import (
    PlainCall,
    chat_answer,
    completion_answer,
    completion_chunk,
    generate_answer,
    read_completion,
    read_generate,
    read_plain_chat,
)
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.plain_requests import PlainAnswer, plain_message, read_worker

log = structlog.get_logger()


class PlainRoutes:
    """What is answered over one desk; without one, nothing is."""

    def __init__(self, desk: PlainDesk | None) -> None:
        self._desk = desk

    async def chat(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """`/v1/chat/completions`. Raises ChatMistake."""
        call, call_id, answers, head = await self._answers(body, read_plain_chat)
        return await answered(request, chat_answer(call_id, call, answers, head), call.is_streamed and chunks)

    async def completions(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """`/v1/completions`. Raises ChatMistake."""
        call, call_id, answers, head = await self._answers(body, read_completion)
        whole = completion_answer(call_id, call, answers, head)
        return await answered(request, whole, call.is_streamed and completion_chunk)

    async def generate(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """`/inference/v1/generate`. Raises ChatMistake."""
        _, call_id, answers, head = await self._answers(body, read_generate)
        return await answered(request, generate_answer(call_id, answers, head), False)

    async def serve_worker(self, request: web.Request) -> web.WebSocketResponse:
        """The line of one worker, until it hangs up."""
        desk = self._need()
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, heartbeat=30.0)
        await socket.prepare(request)
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        worker = desk.join(lambda message: outgoing.put_nowait(plain_message(message)))
        sending = asyncio.ensure_future(_send(socket, outgoing))
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                desk.hear(worker, read_worker(message.data))
        except msgspec.DecodeError:
            log.warning("a worker said what is none of its words")
        finally:
            sending.cancel()
            desk.leave(worker)
        return socket

    async def _answers(
        self, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], PlainCall]
    ) -> tuple[PlainCall, str, Sequence[PlainAnswer], dict[str, Any]]:
        """Call, its name, its answers in order, and what stands at the head of what is said of them."""
        desk = self._need()
        call = read(body)
        policy, step = desk.model(call.model)
        asking = [asyncio.ensure_future(desk.ask(policy, step, one)) for one in call.requests]
        try:
            answers = await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
        desk.counts["requests"] += 1
        newest = max(answer.version for answer in answers)
        head = {"created": int(time.time()), "model": call.model}
        head["system_fingerprint"] = f"{policy}{VERSION_MARK}{newest}"
        return call, call.requests[0].request_id.partition("-")[0], answers, head

    def _need(self) -> PlainDesk:
        if self._desk is None:
            raise ChatMistake(
                "this is the run's key, which belongs to no episode: POST /v1/sessions gives the key of one, and with "
                "gateway.serve = true the run answers requests outside of episodes, too",
                code="no_session",
            )
        return self._desk


async def answered(
    request: web.Request, whole: Mapping[str, Any], pieces: Callable[[Mapping[str, Any]], Sequence[Any]] | bool
) -> web.StreamResponse:
    """The response to a client, in `pieces` as server-sent events where it wants a stream."""
    if not callable(pieces):
        return web.json_response(whole)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for piece in pieces(whole):
        await stream.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
    await stream.write(b"data: [DONE]\n\n")
    return stream


async def _send(socket: web.WebSocketResponse, outgoing: "asyncio.Queue[bytes]") -> None:
    try:
        with suppress(ConnectionError):  # the worker is gone, which its own loop sees
            while True:
                await socket.send_bytes(await outgoing.get())
    finally:
        await socket.close()  # a line that only hears would keep its worker's requests for good
