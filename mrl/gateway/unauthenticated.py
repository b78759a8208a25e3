"""Connections to the gateway that have shown no key: limited, so that a crowd of them keeps nobody out for long.

Any process on this host can connect to the gateway's port. A connection has `STRANGER_S` to show a key. Of more than
`MAX_STRANGERS` without a key the oldest are closed, except those younger than `NEW_S`, whose first request may be on
its way.
"""

import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MAX_STRANGERS = 256
STRANGER_S, NEW_S = 10.0, 1.0


class UnauthenticatedConnections:
    """Connections that have shown a key, and the time since which the others have shown none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: set[RequestHandler] = set()
        self._since_s: dict[RequestHandler, float] = {}

    def let_in(self, request: web.Request) -> None:
        """Note that a request has shown a right key, which frees its connection from the limits."""
        self._known.add(request.protocol)

    def send_away(self, connections: list[RequestHandler]) -> int:
        """Close those of the server's `connections` that exceed the limits, and return their number."""
        now_s = self._clock()
        self._known &= set(connections)
        self._since_s = {one: self._since_s.get(one, now_s) for one in connections if one not in self._known}
        found = list(self._since_s)
        found.sort(key=lambda one: self._since_s[one])
        beyond = len(found) - MAX_STRANGERS
        ages_s = [now_s - self._since_s[one] for one in found]
        gone = [
            one
            for place, (one, age_s) in enumerate(zip(found, ages_s, strict=True))
            if age_s > STRANGER_S or (place < beyond and age_s >= NEW_S)
        ]
        for one in gone:
            if one.transport is not None:
                one.transport.abort()
        return len(gone)
