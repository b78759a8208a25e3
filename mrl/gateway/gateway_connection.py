"""A rollout worker's connection to its run's gateway: a WebSocket in a thread of its own, made anew when it breaks."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import structlog

from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.direct_requests import (
    FromGateway,
    FromWorker,
    WithdrawnRequest,
    WorkerRoom,
    direct_message,
    read_gateway,
)
from mrl.tasks.environments.gateway_location import gateway_of

RETRY_S, BEAT_S, CLOSE_S = 0.5, 30.0, 2.0

log = structlog.get_logger()


class GatewayConnection:
    """One worker's WebSocket to the gateway. When it breaks, all requests that came over it count as withdrawn."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self.on_heard: Callable[[], None] = lambda: None
        """Called in the line's thread when there is a message to `take`."""
        self._heard: queue.SimpleQueue[FromGateway] = queue.SimpleQueue()
        self._unsaid: deque[FromWorker] = deque()
        self._is_saying = False
        """Whether `_say_all` is scheduled in the line's loop and has not begun."""
        self._room: WorkerRoom | None = None
        """Newest WorkerRoom that was sent; it is sent again on every new connection."""
        self._loop = asyncio.new_event_loop()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway-line", daemon=True)
        self._thread.start()
        self._living = asyncio.run_coroutine_threadsafe(self._live(), self._loop)

    def take(self) -> list[FromGateway]:
        """Return the messages since the last call; never waits. A WithdrawnRequest without an id means all requests."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._heard.get_nowait())
        return found

    def send(self, message: FromWorker) -> None:
        """Send a message. What is sent while there is no connection is lost, but for the newest WorkerRoom."""
        if isinstance(message, WorkerRoom):
            self._room = message
        self._unsaid.append(message)
        if not self._is_saying:  # else it goes with the messages before it: waking the thread takes longer than sending
            self._is_saying = True
            self._in_loop(self._say_all())

    def close(self) -> None:
        """Hang up. May be called twice."""
        if self._thread.is_alive():
            self._living.cancel()
            self._in_loop(self._end())
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _live(self) -> None:
        while True:
            with suppress(OSError, ValueError, KeyError, aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                await self._once()
            await asyncio.sleep(RETRY_S)

    async def _once(self) -> None:
        """Serve one connection, from its beginning to its end."""
        url, key = gateway_of(self._run_folder)
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=BEAT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.ws_connect(
                f"{url}/worker", max_msg_size=MAX_MESSAGE_BYTES, heartbeat=BEAT_S, headers=headers
            ) as socket,
        ):
            log.info("connected to the gateway", url=url)
            self._socket = socket
            try:
                if self._room is not None:
                    await self._say(self._room)
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        self._heard.put(read_gateway(message.data))
                        self.on_heard()
            finally:
                self._socket = None
                self._heard.put(WithdrawnRequest(""))
                self.on_heard()

    async def _say_all(self) -> None:
        self._is_saying = False  # first, or a message that comes behind the last one would wait for a further message
        while self._unsaid:
            await self._say(self._unsaid.popleft())

    async def _say(self, message: FromWorker) -> None:
        if self._socket is not None:
            with suppress(ConnectionError, aiohttp.ClientError):
                await self._socket.send_bytes(direct_message(message))

    async def _end(self) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the cancelled line closes its socket
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        self._loop.stop()
