"""Streamed answers: server-sent events in the form of OpenAI's API, or in that of vLLM for token ids.

Pieces that a client has not yet taken are merged, so a slow client gets fewer and longer pieces, and the memory held
for it is bounded by its answers. A client that takes nothing for `STALL_S` is disconnected.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from mrl.gateway.chat_wire import ChatRefusal, answered_choice
from mrl.gateway.direct_wire import DirectCall, as_contents, as_id_contents, as_lists, num_chars, usage_of
from mrl.records.direct_requests import DirectAnswer, DirectChunk, TokenLogprob
from mrl.records.episodes import Message

STALL_S = 60.0
"""Seconds in which a client has to take SLICE_BYTES, or is disconnected."""
SLICE_BYTES = 1 << 16
"""Bytes that are written at a time."""
DONE = b"data: [DONE]\n\n"
OnPiece = Callable[[DirectChunk], None]


class StreamedAnswer:
    """One answer of a streamed call; `text` and `sampled` are the part that has come and was not yet sent."""

    def __init__(self, index: int) -> None:
        self.index, self.version = index, 0
        self.text, self.sampled = "", list[TokenLogprob]()
        self.is_first = True
        self.answer: DirectAnswer | None = None
        """The whole answer once it has come, None before."""
        self.num_sent_chars = 0
        """Characters of the tokens that were sent, each token decoded by itself."""
        self._num_chars = self._num_tokens = 0

    def add(self, piece: DirectChunk) -> None:
        """Add a piece of the answer."""
        self.version = piece.version
        self.text += piece.text
        self.sampled += piece.sampled
        self._num_chars += len(piece.text)
        self._num_tokens += len(piece.sampled)

    def end(self, answer: DirectAnswer) -> None:
        """Add the whole answer at its end: that part of it which no piece has brought."""
        self.version, self.answer = answer.version, answer
        self.text += answer.text[self._num_chars :]
        self.sampled += answer.sampled[self._num_tokens :]

    @property
    def has_news(self) -> bool:
        """Whether anything is to be sent: text, tokens, or the end of the answer."""
        return bool(self.text or self.sampled) or self.answer is not None

    def sent(self) -> None:
        """Note that all that has come was sent."""
        self.num_sent_chars += sum(map(num_chars, self.sampled))
        self.text, self.sampled, self.is_first = "", [], False


Choices = list[dict[str, Any]]
"""JSON of choices, each for a chunk of its own, with the part of one answer that was not yet sent."""


def chat_choices(call_id: str, one: StreamedAnswer, *, wants_logprobs: bool = False) -> Choices:
    """Choices of a chat stream: text as it grows, and each tool call whole, at the end."""
    delta: dict[str, Any] = {"role": "assistant"} if one.is_first else {}
    delta |= {"content": one.text} if one.text or one.is_first else {}
    logprobs = as_contents(one.sampled) if wants_logprobs and one.sampled else None
    choice = {"index": one.index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
    found = [choice] if delta or logprobs else []
    if one.answer is not None:
        said = Message("assistant", one.answer.text, one.answer.tool_calls)
        whole = answered_choice(f"{call_id}-{one.index}", said, is_cut=one.answer.is_cut)
        if calls := whole["message"].get("tool_calls"):
            delta = {"tool_calls": [{"index": place, **made} for place, made in enumerate(calls)]}
            found.append(choice | {"delta": delta, "logprobs": None})
        found.append(choice | {"delta": {}, "logprobs": None, "finish_reason": whole["finish_reason"]})
    return found


def completion_choices(call: DirectCall, one: StreamedAnswer) -> Choices:
    """Choices of a completions stream; with `echo`, the given text and the whole answer come together at the end."""
    given = one.answer.given if one.answer is not None and call.echoes else ()
    text = b"".join(token.spelled for token in given).decode(errors="replace") + one.text
    tokens = (*given, *one.sampled)
    logprobs = as_lists(tokens, one.num_sent_chars) if call.wants_logprobs and tokens else None
    choice = {"index": one.index, "text": text, "finish_reason": None, "logprobs": logprobs}
    return ([choice] if text or logprobs else []) + [
        choice | {"text": "", "logprobs": None, "finish_reason": "length" if answer.is_cut else "stop"}
        for answer in (one.answer,)
        if answer is not None
    ]


def generate_choices(one: StreamedAnswer) -> Choices:
    """Choices of a stream of token ids."""
    reason = None if one.answer is None else "length" if one.answer.is_cut else "stop"
    ids, logprobs = [token.token_id for token in one.sampled], as_id_contents(one.sampled)
    choice = {"index": one.index, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason}
    return [choice] if ids or reason else []


async def stream_answers(
    request: web.Request,
    asking: Sequence[Callable[[OnPiece], Awaitable[DirectAnswer]]],
    *,
    wording: Callable[[StreamedAnswer], Choices],
    head: Callable[[int], Mapping[str, Any]],
    includes_usage: bool = False,
) -> web.StreamResponse:
    """Ask for all answers of a call, and stream their pieces to its client.

    `wording` gives the choices of an answer's next chunks; `head` gives a chunk's other keys, from the version of its
    answer. Raises ChatRefusal for a refusal before the first piece; a later one is the last event of the stream.
    """
    growing, news = [StreamedAnswer(index) for index in range(len(asking))], asyncio.Event()
    tasks = [asyncio.ensure_future(_grow(one, ask, news)) for one, ask in zip(growing, asking, strict=True)]
    stream, left = None, growing
    usage = {"usage": None} if includes_usage else {}
    try:
        while left:
            await news.wait()
            news.clear()
            chunks, ended = [], [one for one in left if one.answer is not None]
            for one in (one for one in left if one.has_news):
                choices = wording(one)
                chunks += [{**head(one.version), "choices": [choice], **usage} for choice in choices]
                one.sent()
            left = [one for one in left if one not in ended]
            if not left and includes_usage:
                counted = usage_of([one.answer for one in growing if one.answer is not None])
                chunks.append({**head(growing[-1].version), "choices": [], "usage": counted})
            if chunks:
                stream = stream or await _begin(request)
                await _send(request, stream, b"".join(map(_event, chunks)) + (b"" if left else DONE))
            for task in tasks:
                if task.done():
                    task.result()
    except ChatRefusal as mistake:
        if stream is None:
            raise
        await _send(request, stream, _event(mistake.as_json()))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert stream is not None, "a call is for one answer at least"
    return stream


async def _grow(one: StreamedAnswer, ask: Callable[[OnPiece], Awaitable[DirectAnswer]], news: asyncio.Event) -> None:
    def grew(piece: DirectChunk) -> None:
        one.add(piece)
        news.set()

    try:
        one.end(await ask(grew))
    finally:
        news.set()


async def _begin(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream


def _event(said: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


async def _send(request: web.Request, stream: web.StreamResponse, data: bytes) -> None:
    """Write data to the client. Raises ConnectionError where it takes no slice within STALL_S."""
    try:
        for start in range(0, len(data), SLICE_BYTES):
            await asyncio.wait_for(stream.write(data[start : start + SLICE_BYTES]), STALL_S)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError(f"the client read nothing for {STALL_S:g} s") from None
