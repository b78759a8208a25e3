"""A small HTTP client for inference servers: every call has a time limit, every answer a size limit."""

import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Bytes of one answer, at most. The experts of one token of a large mixture take 2,000 bytes in SGLang's form."""
CALL_S = 30.0
"""Seconds that a call may last, where it names no other limit."""
IDLE_S = 2.0
"""Seconds without use after which a connection is not used again: the servers close theirs after 5 s."""
MAX_SHOWN_CHARS = 400


class HttpFailure(Exception):
    """Failure of a call that brought no usable answer; `status` is 0 when there was no HTTP answer at all."""

    def __init__(self, route: str, status: int, text: str) -> None:
        shown = " ".join(text.split())[:MAX_SHOWN_CHARS]
        super().__init__(f"{route} answered {status}: {shown}" if status else f"{route}: {shown}")
        self.route, self.status, self.text = route, status, text


class Http:
    """Calls to one server. Make it inside a running event loop; `close` it there."""

    def __init__(self, base_url: str, *, socket_file: Path | None = None, key: str = "") -> None:
        """Call over TCP, or over `socket_file` if it is given; show `key` as a bearer token, if it is not empty."""
        self.base_url = base_url
        options: dict[str, Any] = {"limit": 0, "force_close": False, "keepalive_timeout": IDLE_S}
        connector = (
            aiohttp.UnixConnector(str(socket_file), **options) if socket_file else aiohttp.TCPConnector(**options)
        )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(base_url, connector=connector, headers=headers, json_serialize=_encoded)

    async def get(self, route: str, *, within_s: float = CALL_S, **parameters: str) -> str:
        """Return the text that answers a GET. Raises HttpFailure."""
        return await self._call("GET", route, None, parameters, within_s)

    async def post(self, route: str, body: object = None, *, within_s: float | None = CALL_S, **parameters: str) -> str:
        """Return the text that answers a POST with a JSON body; `within_s` None: no time limit. Raises HttpFailure."""
        return await self._call("POST", route, body, parameters, within_s)

    async def get_json(self, route: str, *, within_s: float = CALL_S, **parameters: str) -> Any:
        """Return the decoded JSON that answers a GET. Raises HttpFailure."""
        return _decoded(route, await self.get(route, within_s=within_s, **parameters))

    async def post_json(
        self, route: str, body: object = None, *, within_s: float | None = CALL_S, **parameters: str
    ) -> Any:
        """Return the decoded JSON that answers a POST. Raises HttpFailure."""
        return _decoded(route, await self.post(route, body, within_s=within_s, **parameters))

    async def post_events(self, route: str, body: object) -> AsyncGenerator[Any, None]:
        """Yield the decoded JSON of the server-sent events that answer a POST, up to [DONE]. Raises HttpFailure."""
        held, scanned, is_done = bytearray(), 0, False
        try:
            async with self._session.post(route, json=body, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                if answer.status >= 400:
                    raise HttpFailure(route, answer.status, await _bounded_text(route, answer))
                async for data in answer.content.iter_any():
                    held += data
                    while (end := held.find(b"\n\n", scanned)) >= 0:
                        said = held[:end].decode(errors="replace").removeprefix("data:").strip()
                        del held[: end + 2]
                        scanned = 0
                        if said == "[DONE]":
                            is_done = True  # read on to the end, so that the connection can serve another call
                        elif said:
                            yield _decoded(route, said)
                    scanned = max(0, len(held) - 1)  # half of an event's end may have come
                    if len(held) > MAX_ANSWER_BYTES:
                        raise HttpFailure(
                            route, answer.status, f"the server sent an event of more than {MAX_ANSWER_BYTES} bytes"
                        )
        except (aiohttp.ClientError, OSError) as error:
            raise HttpFailure(route, 0, str(error) or type(error).__name__) from error
        if not is_done:
            raise HttpFailure(route, 0, "the response ended before its end marker")

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _call(
        self, method: str, route: str, body: object, parameters: dict[str, str], within_s: float | None
    ) -> str:
        limit = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._session.request(method, route, json=body, params=parameters, timeout=limit) as answer:
                text = await _bounded_text(route, answer)
        except TimeoutError as error:
            raise HttpFailure(route, 0, f"no answer within {within_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpFailure(route, 0, str(error) or type(error).__name__) from error
        if answer.status >= 400:
            raise HttpFailure(route, answer.status, text)
        return text


async def _bounded_text(route: str, answer: aiohttp.ClientResponse) -> str:
    data = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise HttpFailure(route, answer.status, f"the response has more than {MAX_ANSWER_BYTES} bytes")
    return data.decode("utf-8", errors="replace")


def _encoded(body: object) -> str:
    """Encode as JSON by msgspec, which takes a tenth of the time of `json` for the ids of a long text."""
    return msgspec.json.encode(body).decode()


def _decoded(route: str, text: str) -> Any:
    """Decode JSON. An answer of 16,000 tokens is 2 MB, which msgspec reads in a third of the time of `json`; `json`
    takes what msgspec refuses, such as NaN. Raises HttpFailure."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise HttpFailure(route, 200, f"the response is not valid JSON: {text}") from error
