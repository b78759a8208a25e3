"""Connections to the gateway that have shown no key: a crowd of them keeps nobody out for long.

Whoever is on this host can connect to a port of it. Such connections have `STRANGER_S` to show a key, and of more than
`MAX_STRANGERS` the oldest go, but for those so new that their first request may be on its way.
"""

import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

MAX_STRANGERS = 256
STRANGER_S, NEW_S = 10.0, 1.0


class Strangers:
    """Told of every connection that shows a key; looks at all of them again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: set[RequestHandler] = set()
        self._since_s: dict[RequestHandler, float] = {}

    def let_in(self, request: web.Request) -> None:
        """The request has a right key, and so its connection."""
        self._known.add(request.protocol)

    def send_away(self, connections: list[RequestHandler]) -> int:
        """Close what may not stay of all connections that there are; returns how many."""
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
