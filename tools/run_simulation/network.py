"""Simulated links, as of `mrl.transport`: within a connection messages come in order, late, and are lost with it.

A client finds its server by an address that it looked up; a server of the same name may have another one later. Between
hosts that cannot reach each other messages wait, as in TCP, until they can, or until the client gives the link up.
Messages that were on their way over a link that was given up may still arrive, behind those of the next link. A host
that is gone says nothing: messages to it vanish.
"""

import itertools
from collections import deque
from collections.abc import Callable

from run_simulation.world import Process, World

SAME_ADDRESS_SHARE = 0.7
LATE_SHARE = 0.5
MEAN_DELAY_S = 0.004
MAX_QUEUED = 2000

Handle = Callable[[bytes, bytes], object]


class Server:
    """A listening process. Answers go to the newest connection on which it heard a client."""

    def __init__(self, network: "Network", process: Process, handle: Handle) -> None:
        self.process, self.handle = process, handle
        self.routes: dict[bytes, Connection] = {}
        self._network = network

    def send(self, client: bytes, body: bytes) -> bool:
        """Post a message to a client; return False when the client has no connection."""
        connection = self.routes.get(client)
        return connection is not None and connection.post(body, to_server=False)


class Connection:
    """Connection between one client and one server."""

    def __init__(self, network: "Network", link: "Link", server: Server) -> None:
        self.is_open = True
        self.is_half = False
        """Whether the other side is gone without a sign."""
        self._network, self._link, self._server = network, link, server
        self._free_s = {True: 0.0, False: 0.0}
        self._held: dict[bool, deque[bytes]] = {True: deque(), False: deque()}
        self._arrives_late = network.world.rng.random() < LATE_SHARE
        self._number = next(network.numbers)

    def hosts(self, *, to_server: bool) -> tuple[str, str]:
        """Hosts (from, to) of one direction."""
        ends = self._link.process.host.name, self._server.process.host.name
        return ends if to_server else ends[::-1]

    def post(self, body: bytes, *, to_server: bool) -> bool:
        """Send a message on its way; return whether the connection is open."""
        if not self.is_open:
            return False
        if not self.is_half:
            world = self._network.world
            at_s = max(self._free_s[to_server], world.now_s + world.rng.expovariate(1 / self._network.delay_s))
            self._free_s[to_server] = at_s
            world.push(at_s - world.now_s, None, lambda: self._arrive(body, to_server=to_server))
        return True

    def close(self) -> None:
        """Close the connection: the client gave it up, or it was cut."""
        self.is_open = False

    def flush(self) -> None:
        """Hand over the messages held back whose way is free again."""
        for to_server, held in self._held.items():
            while held and not self._network.is_cut(self.hosts(to_server=to_server)):
                self._hand_over(held.popleft(), to_server=to_server)

    def _arrive(self, body: bytes, *, to_server: bool) -> None:
        if self._held[to_server] or self._network.is_cut(self.hosts(to_server=to_server)):
            self._held[to_server].append(body)
        else:
            self._hand_over(body, to_server=to_server)

    def _hand_over(self, body: bytes, *, to_server: bool) -> None:
        if self.is_half or not (self.is_open or (to_server and self._arrives_late)):
            return
        server, link = self._server, self._link
        if to_server:
            server.process.at(0.0, lambda: self._serve(body))
        else:
            link.process.at(0.0, lambda: link.on_message(body))

    def _serve(self, body: bytes) -> None:
        known = self._server.routes.get(self._link.client)
        if known is None or known._number < self._number:
            self._server.routes[self._link.client] = self
        self._server.handle(self._link.client, body)


class Link:
    """A client's end of a link, with the methods of `mrl.transport.background.BackgroundClient`."""

    def __init__(
        self, network: "Network", process: Process, server: str, client: str, on_message: Callable[[bytes], object]
    ) -> None:
        self.process, self.client, self.on_message = process, client.encode(), on_message
        self._network, self._server = network, server
        self._queue: deque[bytes] = deque()
        self._address: int | None = None
        self._connection: Connection | None = None
        process.on_end.append(self._end)

    def post(self, body: bytes) -> bool:
        """Queue a message; return whether there is room."""
        if len(self._queue) >= MAX_QUEUED:
            return False
        self._queue.append(body)
        self.turn()
        return True

    def restart(self) -> None:
        """Look up the server's address again, and drop what is queued."""
        self._queue.clear()
        self.request_reconnect()

    def request_reconnect(self) -> None:
        """Look up the server's address again."""
        self._drop()
        self._address = self._network.addresses.get(self._server)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the link."""
        self._drop()

    def turn(self) -> None:
        """Connect if possible, and send queued messages."""
        if self._address is None:
            self._address = self._network.addresses.get(self._server)
        if self._connection is None or not self._connection.is_open:
            self._connection = self._network.connect(self, self._address)
        while self._queue and self._connection is not None and self._connection.post(self._queue[0], to_server=True):
            self._queue.popleft()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _end(self, with_host: bool) -> None:
        if self._connection is not None and with_host:
            self._connection.is_half = True
        else:
            self._drop()


class Network:
    """Listening servers with their addresses, and directions between hosts that are cut."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delay_s = MEAN_DELAY_S
        self.addresses: dict[str, int] = {}
        """Server's name -> address at which it listens, or listened last."""
        self.numbers = itertools.count()
        """Numbers of connections, in the order in which they were made."""
        self._connections: list[Connection] = []
        self._listening: dict[int, Server] = {}
        self._cut: set[tuple[str, str]] = set()

    def listen(self, process: Process, name: str, handle: Handle) -> Server:
        """Let a server begin to listen."""
        server = Server(self, process, handle)
        before = self.addresses.get(name)
        keeps = before is not None and before not in self._listening and self.world.rng.random() < SAME_ADDRESS_SHARE
        address = before if keeps and before is not None else self.world.rng.randrange(10**9)
        self.addresses[name], self._listening[address] = address, server
        process.on_end.append(lambda with_host: self._end(address, with_host=with_host))
        return server

    def connect(self, link: Link, address: int | None) -> Connection | None:
        """Connect a link, or return None unless somebody listens at the address and both directions are free."""
        server = self._listening.get(-1 if address is None else address)
        if server is None:
            return None
        connection = Connection(self, link, server)
        if self.is_cut(connection.hosts(to_server=True)) or self.is_cut(connection.hosts(to_server=False)):
            return None
        self._connections.append(connection)
        return connection

    def is_cut(self, hosts: tuple[str, str]) -> bool:
        """Whether the direction from the first host to the second is cut."""
        return hosts in self._cut

    def cut(self, way: tuple[str, str], for_s: float) -> None:
        """Cut one direction between hosts for some seconds."""
        self._cut.add(way)
        self.world.push(for_s, None, lambda: self._heal(way))

    def reset(self) -> None:
        """Break most connections between hosts, with the messages on their way."""
        for connection in self._connections:
            ends = connection.hosts(to_server=True)
            if ends[0] != ends[1] and self.world.rng.random() < 0.7:
                connection.close()

    def _heal(self, way: tuple[str, str]) -> None:
        self._cut.discard(way)
        for connection in self._connections:
            connection.flush()

    def _end(self, address: int, *, with_host: bool) -> None:
        server = self._listening.pop(address)
        for connection in server.routes.values():
            if with_host:
                connection.is_half = True
            else:
                connection.close()
