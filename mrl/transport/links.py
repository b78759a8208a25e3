"""Who is behind each connection of a server: the key proves it, the routing id has to fit the key.

A client's routing id is its name, a zero byte and a nonce that nobody else knows: another client cannot take the
connection over, although the socket hands a routing id on to whoever connects with it last. Answers go by name, to the
connection on which a key with the right to that name was heard first after all others.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from mrl.transport.allow_list import AllowList
from mrl.transport.grants import Grant

MAX_LINKS = 16_384
NONCE_BYTES = 16
SEPARATOR = b"\0"

Admits = Callable[[Grant], bool]
"""Whether a server has anything to say to clients of a grant."""


def routing_id(name: str) -> bytes:
    """A fresh routing id for the client called `name`."""
    return name.encode() + SEPARATOR + secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Link:
    """One connection that was let in. `connection` is what its kernel object can be found by."""

    client: bytes
    key: str
    grant: Grant
    connection: tuple[int, int]


class Links:
    """The connections of one server, by routing id, and the newest of every client. Used by one thread."""

    def __init__(self, allowed: AllowList, admits: Admits, *, max_links: int = MAX_LINKS) -> None:
        self._allowed, self._admits, self._max_links = allowed, admits, max_links
        self._links: dict[bytes, Link] = {}
        self._routes: dict[bytes, bytes] = {}

    def known(self, routing: bytes, key: str) -> Link | None:
        """The link that was let in under this routing id, if this key is the one behind it."""
        link = self._links.get(routing)
        return link if link is not None and link.key == key else None

    def refusal(self, key: str) -> str:
        """Why a client with this key is not let in; empty when it is. Safe from any thread."""
        grant = self._allowed.find(key)
        if grant is None:
            return "revoked_key" if self._allowed.is_revoked(key) else "unknown_key"
        return "" if self._admits(grant) else "role"

    def admit(self, routing: bytes, key: str, connection: tuple[int, int]) -> Link | str:
        """Let a connection in whose first message this is, or the reason why not.

        "unnamed" is who never said a name, and also what was still queued of a connection when its client came back
        over another: the socket takes the name from the old one.
        """
        grant = self._allowed.find(key)
        if grant is None or not self._admits(grant):
            return self.refusal(key) or "revoked_key"
        client = routing.partition(SEPARATOR)[0]
        if not client:
            return "unnamed"
        if not grant.covers(client.decode("utf-8", errors="replace")):
            return "impersonation"
        link = Link(client, key, grant, connection)
        self._links[routing] = link
        self._routes[client] = routing
        if len(self._links) > self._max_links:
            self._forget(next(iter(self._links)))
        return link

    def route(self, client: bytes) -> bytes | None:
        """The routing id of the client's newest connection."""
        return self._routes.get(client)

    def drop_refused(self) -> list[Link]:
        """Forget the links that the allow-list no longer lets in, and return them."""
        gone = [(routing, link) for routing, link in self._links.items() if self._allowed.find(link.key) != link.grant]
        for routing, _ in gone:
            self._forget(routing)
        return [link for _, link in gone]

    def _forget(self, routing: bytes) -> None:
        client = self._links.pop(routing).client
        if self._routes.get(client) == routing:
            del self._routes[client]
