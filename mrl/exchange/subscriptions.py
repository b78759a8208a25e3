"""Requests to policies: each is with one of the policy's subscribed clients at a time, until it is taken over.

A client gets no request unless it renews its subscription in time. After it let a request lie, it gets none until it
renews; the request goes to the next client in turn.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from mrl.exchange.sessions import CLAIM_S
from mrl.records.exchange_messages import RequestKind

LAPSE_S = 2.5
"""Seconds after which a subscription lapses; living clients renew every second."""
MAX_GIVEN = 64
"""Requests that one client may have at once."""

Address = tuple[str, RequestKind]
"""(policy that is asked, kind of request)."""


@dataclass(slots=True)
class _Request:
    address: Address
    client: bytes = b""
    """Transport identity of the client that has the request; empty when none has."""
    due_s: float = 0.0
    """Clock time at which the request is taken back."""


class Subscriptions:
    """Hands requests to subscribers in turn. Holds ids only; a record that leaves the index is dropped here too."""

    def __init__(self) -> None:
        self._turns: dict[Address, dict[bytes, float]] = {}
        """Address -> subscriber -> time of its last renewal; the first subscriber is next."""
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[Address, dict[str, None]] = {}
        """Address -> ids of requests that no client has, the next at the front."""
        self._given: dict[str, _Request] = {}
        """Requests that a client has, in order of `due_s`."""
        self._load: Counter[bytes] = Counter()
        """Client -> number of requests that it has."""

    @property
    def num_given(self) -> int:
        """Number of requests that a client has."""
        return len(self._given)

    @property
    def num_waiting(self) -> int:
        """Number of requests that no client has."""
        return len(self._requests) - len(self._given)

    def subscribe(self, client: bytes, policy: str, kinds: Collection[RequestKind], now_s: float) -> None:
        """Open or renew the client's subscription to requests of these kinds to `policy`, and end all its others."""
        addresses: set[Address] = {(policy, kind) for kind in kinds}
        for address in [address for address in self._turns if address not in addresses]:
            self._leave(client, address)
        for address in addresses:
            self._turns.setdefault(address, {})[client] = now_s

    def forget(self, client: bytes) -> None:
        """End the client's subscriptions, and take back the requests that it has."""
        for address in list(self._turns):
            self._leave(client, address)
        for record_id in [record_id for record_id, request in self._given.items() if request.client == client]:
            self._take_back(record_id)

    def post(self, record_id: str, address: Address) -> None:
        """Add a new request, for the subscriber whose turn it is."""
        self._requests[record_id] = _Request(address)
        self._waiting.setdefault(address, {})[record_id] = None

    def drop(self, record_id: str) -> None:
        """Remove a request; an id that is none is ignored."""
        if record_id in self._given:
            self._take_back(record_id)
        request = self._requests.pop(record_id, None)
        if request is not None:
            self._unqueue(record_id, request.address)

    def is_to(self, record_id: str, policy: str) -> bool:
        """Whether this record is an open request to `policy`."""
        request = self._requests.get(record_id)
        return request is not None and request.address[0] == policy

    def hand_out(self, now_s: float) -> list[tuple[bytes, str]]:
        """Give waiting requests, oldest first, to subscribers in turn; return (client, record id) of each."""
        self._take_back_overdue(now_s)
        given: list[tuple[bytes, str]] = []
        for address in list(self._waiting):
            while address in self._waiting and (client := self._next(address, now_s)):
                record_id = next(iter(self._waiting[address]))
                self._give(record_id, client, now_s)
                given.append((client, record_id))
        return given

    def _next(self, address: Address, now_s: float) -> bytes:
        """Return the subscriber whose turn it is, and move it to the end; empty when none lives and has room."""
        turn = self._turns.get(address, {})
        for client, renewed_s in turn.items():
            if now_s - renewed_s <= LAPSE_S and self._load[client] < MAX_GIVEN:
                del turn[client]
                turn[client] = renewed_s
                return client
        return b""

    def _give(self, record_id: str, client: bytes, now_s: float) -> None:
        request = self._requests[record_id]
        self._unqueue(record_id, request.address)
        request.client, request.due_s = client, now_s + CLAIM_S
        self._given[record_id] = request
        self._load[client] += 1

    def _take_back_overdue(self, now_s: float) -> None:
        for record_id, request in list(takewhile(lambda item: item[1].due_s <= now_s, self._given.items())):
            for turn in self._turns.values():
                if request.client in turn:
                    turn[request.client] = -inf
            self._take_back(record_id)

    def _take_back(self, record_id: str) -> None:
        request = self._given.pop(record_id)
        self._load[request.client] -= 1
        if not self._load[request.client]:
            del self._load[request.client]
        request.client = b""
        self._waiting.setdefault(request.address, {})[record_id] = None

    def _unqueue(self, record_id: str, address: Address) -> None:
        waiting = self._waiting.get(address, {})
        waiting.pop(record_id, None)
        if not waiting:
            self._waiting.pop(address, None)

    def _leave(self, client: bytes, address: Address) -> None:
        turn = self._turns[address]
        turn.pop(client, None)
        if not turn:
            del self._turns[address]
