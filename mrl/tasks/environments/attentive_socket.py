"""A client's WebSocket that is read at all times, so that pings are answered while nobody waits for a message.

aiohttp answers a ping only within `receive`, and servers close a connection whose pings are not answered: the gateway
after 45 s, uvicorn after 40 s. While a policy has its turn, which may take longer, no message is awaited.
"""

import asyncio

import aiohttp

ENDS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
"""Types of a connection's last message."""
MAX_UNREAD = 16
"""Messages that wait for `receive`, at most. A server that sends more is not read meanwhile."""


class AttentiveSocket:
    """An open WebSocket. All calls are made in its event loop."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Begin to read."""
        self.socket = socket
        self._came: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(MAX_UNREAD)
        self._last: aiohttp.WSMessage | None = None
        """The message that ended the connection, once it was returned."""
        self._reading = asyncio.ensure_future(self._read())

    async def receive(self) -> aiohttp.WSMessage:
        """Return the next message; of a connection that has ended, its last message again."""
        if self._last is not None:
            return self._last
        message = await self._came.get()
        if message.type in ENDS:
            self._last = message
        return message

    async def close(self) -> None:
        """Close the connection."""
        await self.socket.close()
        self._reading.cancel()

    async def _read(self) -> None:
        message = None
        while message is None or message.type not in ENDS:
            message = await self.socket.receive()
            await self._came.put(message)
