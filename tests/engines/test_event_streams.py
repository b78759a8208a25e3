"""Server-sent events as they come in pieces, however these are cut."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mrl.engines.http import Http, HttpFailure

EVENTS = [{"a": "x\n\ny"}, {"b": 2}, {"c": "ü" * 5}]
WRITTEN = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS)
DONE = b"data: [DONE]\n\n"


class Answering:
    """A session whose answer comes in these pieces, and which is that answer."""

    status = 200

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces, self.content = pieces, self

    @asynccontextmanager
    async def post(self, route: str, **asked: Any) -> AsyncGenerator["Answering", None]:
        yield self

    async def iter_any(self) -> AsyncGenerator[bytes, None]:
        for piece in self._pieces:
            yield piece


def told(pieces: Sequence[bytes]) -> list[Any]:
    async def script() -> list[Any]:
        http = Http("http://127.0.0.1:1")
        await http.close()
        http._session = Answering(pieces)  # type: ignore[assignment]
        return [event async for event in http.post_events("/generate", {})]

    return asyncio.run(script())


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size):
    """Between the two ends of a line, within a letter, or many in one piece."""
    assert told(cut(WRITTEN + DONE, size)) == EVENTS
    with pytest.raises(HttpFailure, match="ended before its end marker"):
        told(cut(WRITTEN, size))


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [-Infinity, 1e-05]}', '"\\ud800"', '{"a": 1, "a": "\\u00fc"}'])
def test_what_servers_write_beside_strict_json_is_read(text):
    """As Python's own reader does: numbers that are none, halves of characters, a name twice."""
    (event,) = told([b"data: " + text.encode() + b"\n\n" + DONE])
    assert repr(event) == repr(json.loads(text))


def test_what_is_no_json_is_a_failure_of_the_call():
    """It says what came."""
    with pytest.raises(HttpFailure, match=r"the response is not valid JSON: \{nothing"):
        told([b"data: {nothing\n\n" + DONE])


def test_an_event_has_a_limit(monkeypatch):
    """One that is whole by then as well as one that goes on."""
    monkeypatch.setattr("mrl.engines.http.MAX_ANSWER_BYTES", 40)
    assert told(cut(WRITTEN + DONE, 8)) == EVENTS
    with pytest.raises(HttpFailure, match="an event of more than 40 bytes"):
        told(cut(b"data: " + b"1" * 60, 8))


def test_a_long_event_takes_time_by_its_length():
    """The experts of a long turn come in one event, and other answers wait meanwhile: here it had taken a minute."""
    long = b"data: " + json.dumps("A" * (16 << 20)).encode() + b"\n\n" + DONE
    began_s = time.process_time()
    assert len(told(cut(long, 1 << 12))[0]) == 16 << 20
    assert time.process_time() - began_s < 5.0
