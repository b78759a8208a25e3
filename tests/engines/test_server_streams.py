"""Streams of vLLM and SGLang, as their backends read them; test_conformance.py asks the real servers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from mrl.engines.engine import Sampling
from mrl.engines.server_backend import Segment
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.records.finish import FinishReason
from tests.engines.test_vllm import sampled

SAMPLING = Sampling(1.0, 9, (1, 2))


class Events:
    """A server that answers with these events."""

    def __init__(self, *events: Any) -> None:
        self._events = events
        self.is_closed = False

    async def post_events(self, route: str, body: Any) -> AsyncGenerator[Any, None]:
        try:
            for event in self._events:
                yield event
        finally:
            self.is_closed = True


def stream(backend: SGLang | VLLM, server: Events) -> AsyncGenerator[Segment, None]:
    return backend.stream(server, [7], SAMPLING, max_new_tokens=9, seed=1, request_id="r")  # type: ignore[arg-type]


def event(ids: list[int], logprob_ids: list[int], num_tokens: int, reason: str = "") -> dict[str, Any]:
    """One of SGLang, of `num_tokens` so far; the log-probability of token n is -n/100."""
    logprobs = [(-n / 100, n, None) for n in logprob_ids]
    meta = {"finish_reason": {"type": reason} if reason else None, "completion_tokens": num_tokens}
    return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": logprobs}}


RAN = [event([4], [4], 1), event([5, 6], [5, 6], 3)]
GROWN = [event([4, 5], [4], 1), event([4, 5, 6], [4, 5, 6], 3)]
"""The list of ids goes on growing while an event of it waits."""


@pytest.mark.parametrize(
    ("sends_parts", "events", "told"),
    [
        (True, [*RAN, event([8], [8], 4, "length")], [[4], [5, 6], [8]]),
        (False, [*GROWN, event([4, 5, 6, 8], [4, 5, 6, 8], 4, "length")], [[4], [5, 6], [8]]),
        (True, [*RAN, event([8], [8], 4, "abort")], [[4], [5, 6], [8]]),
        (True, [*RAN, event([6], [4, 5, 6], 3, "abort")], [[4], [5, 6], []]),
        (True, [RAN[0], event([4], [4], 1, "abort")], [[4], []]),
        (True, [RAN[0], event([5, 6, 6], [5, 6, 4, 5, 6], 3, "abort")], [[4], [5, 6]]),
        (True, [event([], [], 0, "abort")], [[]]),
        (False, [*GROWN, event([4, 5, 6], [4, 5, 6], 3, "abort")], [[4], [5, 6], []]),
    ],
    ids=["parts", "wholes", "aborted", "retracted", "retracted-first", "retracted-merged", "queued", "retracted-whole"],
)
def test_sglang_tells_each_token_once(sends_parts, events, told):
    """One that waits for its turn again and is given up repeats its last token, with all log-probabilities."""
    backend = SGLang()
    backend._sends_parts = sends_parts

    async def script() -> list[Segment]:
        async with aclosing(stream(backend, Events(*events))) as parts:
            return [part async for part in parts]

    parts = asyncio.run(script())

    assert [part.token_ids for part in parts] == told
    assert [part.logprobs for part in parts] == [[-n / 100 for n in ids] for ids in told]
    assert [part.finish_reason for part in parts[:-1]] == [FinishReason.ABORT] * (len(told) - 1)


@pytest.mark.parametrize(("backend", "part"), [(SGLang(), RAN[0]), (VLLM(), sampled([4], "length"))])
def test_a_stream_that_is_closed_has_let_its_connection_go(backend, part):
    """At once, and not when Python comes to it."""
    server = Events(part, part)

    async def script() -> None:
        async with aclosing(stream(backend, server)) as parts:
            await anext(parts)
        assert server.is_closed

    asyncio.run(script())
