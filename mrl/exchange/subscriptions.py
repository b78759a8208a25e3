"""Requests to one policy: each is with one of its subscribed clients at a time, until somebody of the policy is done.

A client is given nothing while it does not renew its subscription, or after it let something lie until it renews. What
it was given then goes to the next in turn.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from mrl.exchange.sessions import CLAIM_S
from mrl.records.exchange_messages import RequestKind

LAPSE_S = 2.5
"""Living clients renew every second."""
MAX_GIVEN = 64
"""Requests that are with one client at once."""

Address = tuple[str, RequestKind]
"""Policy and what is asked of it."""


@dataclass(slots=True)
class _Request:
    address: Address
    client: bytes = b""
    """Who has it; nobody when empty."""
    due_s: float = 0.0
    """When it is taken back."""


class Subscriptions:
    """Who serves which requests, in turn. Holds ids only; what leaves the index is dropped here too."""

    def __init__(self) -> None:
        self._turns: dict[Address, dict[bytes, float]] = {}
        """Subscribers by the time of their last renewal; the first in the dict is next."""
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[Address, dict[str, None]] = {}
        self._given: dict[str, _Request] = {}
        """In order of `due_s`."""
        self._load: Counter[bytes] = Counter()

    @property
    def num_given(self) -> int:
        """Requests that are with a client."""
        return len(self._given)

    @property
    def num_waiting(self) -> int:
        """Requests that nobody has."""
        return len(self._requests) - len(self._given)

    def subscribe(self, client: bytes, policy: str, kinds: Collection[RequestKind], now_s: float) -> None:
        """Open or renew the client's subscription to requests of these kinds to `policy`, and end all its others."""
        addresses: set[Address] = {(policy, kind) for kind in kinds}
        for address in [address for address in self._turns if address not in addresses]:
            self._leave(client, address)
        for address in addresses:
            self._turns.setdefault(address, {})[client] = now_s

    def forget(self, client: bytes) -> None:
        """End the client's subscriptions and take back what it has."""
        for address in list(self._turns):
            self._leave(client, address)
        for record_id in [record_id for record_id, request in self._given.items() if request.client == client]:
            self._take_back(record_id)

    def post(self, record_id: str, address: Address) -> None:
        """A new request, for whoever is next."""
        self._requests[record_id] = _Request(address)
        self._waiting.setdefault(address, {})[record_id] = None

    def drop(self, record_id: str) -> None:
        """The request is no more, if it ever was one."""
        if record_id in self._given:
            self._take_back(record_id)
        request = self._requests.pop(record_id, None)
        if request is not None:
            self._unqueue(record_id, request.address)

    def is_to(self, record_id: str, policy: str) -> bool:
        """Whether this is an open request to `policy`."""
        request = self._requests.get(record_id)
        return request is not None and request.address[0] == policy

    def hand_out(self, now_s: float) -> list[tuple[bytes, str]]:
        """Give what nobody has, oldest first, to subscribers in turn: (client, record id)."""
        self._take_back_overdue(now_s)
        given: list[tuple[bytes, str]] = []
        for address in list(self._waiting):
            while address in self._waiting and (client := self._next(address, now_s)):
                record_id = next(iter(self._waiting[address]))
                self._give(record_id, client, now_s)
                given.append((client, record_id))
        return given

    def _next(self, address: Address, now_s: float) -> bytes:
        """The subscriber whose turn it is, moved to the end; empty when none lives and has room."""
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
