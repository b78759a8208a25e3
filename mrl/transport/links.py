"""The client behind each connection of a server: the key proves it, and the routing id has to fit the key.

A client's routing id is its name, a zero byte and a nonce that no other client knows. So another client cannot take the
connection over, although the socket hands a routing id on to the client that connects with it last. Answers go by name,
to the newest admitted connection of a key that covers the name.
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
"""Whether a server admits clients of a grant."""


def routing_id(name: str) -> bytes:
    """Return a fresh routing id for the client called `name`."""
    return name.encode() + SEPARATOR + secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Link:
    """One admitted connection. `connection` identifies its kernel object: descriptor and inode."""

    client: bytes
    key: str
    grant: Grant
    connection: tuple[int, int]


class Links:
    """The admitted connections of one server by routing id, and the newest of every client. Used by one thread."""

    def __init__(self, allowed: AllowList, admits: Admits, *, max_links: int = MAX_LINKS) -> None:
        self._allowed, self._admits, self._max_links = allowed, admits, max_links
        self._links: dict[bytes, Link] = {}
        self._routes: dict[bytes, bytes] = {}

    def known(self, routing: bytes, key: str) -> Link | None:
        """Return the link admitted under this routing id, if it has this key."""
        link = self._links.get(routing)
        return link if link is not None and link.key == key else None

    def refusal(self, key: str) -> str:
        """Return the reason against admitting a client with this key; empty without a reason. Safe from any thread."""
        grant = self._allowed.find(key)
        if grant is None:
            return "revoked_key" if self._allowed.is_revoked(key) else "unknown_key"
        return "" if self._admits(grant) else "role"

    def admit(self, routing: bytes, key: str, connection: tuple[int, int]) -> Link | str:
        """Admit a connection by its first message, or return the reason against it.

        "unnamed" is the reason for a client that never said a name. The same reason holds for queued messages of an old
        connection when its client came back over a new one: the socket takes the name from the old connection.
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
        """Return the routing id of the client's newest connection."""
        return self._routes.get(client)

    def drop_refused(self) -> list[Link]:
        """Forget the links whose keys the allow-list no longer allows, and return them."""
        gone = [(routing, link) for routing, link in self._links.items() if self._allowed.find(link.key) != link.grant]
        for routing, _ in gone:
            self._forget(routing)
        return [link for _, link in gone]

    def _forget(self, routing: bytes) -> None:
        client = self._links.pop(routing).client
        if self._routes.get(client) == routing:
            del self._routes[client]
