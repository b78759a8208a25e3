"""A small HTTP server for what the daemon says about itself, on a thread of its own.

It has no keys: whoever reaches it may read it, and can do nothing else. A request is at most 8 KiB long and one of GET
and HEAD; connection, request and answer together may take 5 s, and 16 connections may be open. Whatever exceeds this is
closed and counted; the daemon's loop never notices.
"""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import structlog

from mrl.transport.server import check_address

MAX_REQUEST_BYTES = 8 * 1024
MAX_CONNECTIONS = 16
ANSWER_S = 5.0
CLOSE_S = 2.0

TEXT = "text/plain; charset=utf-8"

log = structlog.get_logger()


class Page(NamedTuple):
    """What a path answers."""

    status: int
    content_type: str
    body: bytes


class PageServer:
    """Serves `pages` by path until it is closed."""

    def __init__(self, pages: Mapping[str, Callable[[], Page]], *, host: str, port: int, answer_s: float = ANSWER_S):
        """Listen on `host:port`; port 0 takes a free one. Raises AddressError."""
        check_address(host, port)
        self.counts: Counter[str] = Counter()
        """Connections by how they ended: HTTP status, "too_many", "too_slow", or "gone"."""
        self._pages, self._answer_s = pages, answer_s
        self._open: set[asyncio.StreamWriter] = set()
        self._socket = socket.create_server(("" if host == "*" else host, port), backlog=MAX_CONNECTIONS)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Connections at the moment."""
        return len(self._open)

    @property
    def is_serving(self) -> bool:
        """Whether somebody answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening and break off what is open."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MAX_REQUEST_BYTES)
        await self._stop.wait()
        # What was accepted when the server closes, or whose task never began when the loop ends, would stay open.
        self._loop.remove_reader(self._socket)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._open:
                writer.transport.abort()
            await asyncio.wait(others)
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if not self._stop.is_set():
                self.counts[await self._talk(reader, writer)] += 1
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """One request and its answer; returns how that ended."""
        if self.num_open > MAX_CONNECTIONS:
            return "too_many"
        try:
            async with asyncio.timeout(self._answer_s):
                page, answer = self._answer(await _head(reader))
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except TimeoutError:
            return "too_slow"
        except (OSError, asyncio.IncompleteReadError):
            return "gone"
        return str(page.status)

    def _answer(self, head: bytes | None) -> tuple[Page, bytes]:
        method, page = self._page(head)
        reason = HTTPStatus(page.status).phrase
        lines = [
            f"HTTP/1.1 {page.status} {reason}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *(["Allow: GET, HEAD"] if page.status == HTTPStatus.METHOD_NOT_ALLOWED else []),
        ]
        return page, "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else page.body)

    def _page(self, head: bytes | None) -> tuple[str, Page]:
        """The method of a request and the page that it gets."""
        if head is None:
            return "", _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        parts = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "", _said(HTTPStatus.BAD_REQUEST)
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return method, _said(HTTPStatus.METHOD_NOT_ALLOWED)
        make = self._pages.get(target.partition("?")[0])
        return method, _made(make) if make else _said(HTTPStatus.NOT_FOUND)


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """Everything before the first empty line; None when there is too much of it."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None


def _made(make: Callable[[], Page]) -> Page:
    try:
        return make()
    except Exception:
        log.exception("a page could not be made")
        return _said(HTTPStatus.INTERNAL_SERVER_ERROR)


def _said(status: HTTPStatus) -> Page:
    return Page(status, TEXT, f"{status.value} {status.phrase}\n".encode())
