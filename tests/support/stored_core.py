"""The exchange's core with a file that commits at once, and messages with which tests speak to it."""

import itertools
from collections.abc import Callable

import msgspec

from mrl.errors import RecordError
from mrl.exchange.contents import Contents
from mrl.exchange.core import ExchangeCore, Outgoing
from mrl.exchange.limits import Limits
from mrl.exchange.transaction import Transaction
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import (
    ClientMessage,
    Deliver,
    Hello,
    Put,
    StatRequest,
    client_message_decoder,
)
from mrl.records.experience import ExperienceRecord, experience_decoder
from mrl.transport.grants import Grant

_numbers = itertools.count(1000)


class StoredCore(ExchangeCore):
    """Core whose transactions are committed before `handle` returns, and noted in `committed`.

    `failure()` says why nothing can be committed at the moment, "" when it can. With `is_slow` no transaction is
    committed before the test calls `finish`; it finds the transaction in `under_way`.
    """

    def __init__(self, *, failure: Callable[[], str] = lambda: "", is_slow: bool = False, **limits: object) -> None:
        self._failure, self._is_slow = failure, is_slow
        self.committed: list[Transaction] = []
        self.under_way: Transaction | None = None
        defaults = {"budget_bytes": 1_000_000, "max_age_versions": 100}
        super().__init__(Limits(**defaults | limits), incarnation="one", started_s=0.0)

    def handle(self, client: bytes, message: ClientMessage, now_s: float, *, policy: str = "") -> Outgoing:
        """Handle a message and commit. The client's key is of `policy`, or of the policy that a Hello names."""
        told = message.policy if isinstance(message, Hello) else "any"
        grant = Grant("admin") if isinstance(message, StatRequest) else Grant("worker", policy or told)
        return super().handle(client, message, grant, now_s) + self.commit_all(now_s)

    def receive_body(self, client: bytes, body: bytes, now_s: float) -> Outgoing:
        """Handle a message as it comes over the wire."""
        try:
            message = decode(body, client_message_decoder)
        except RecordError:
            return self.receive(client, body, Grant("worker", "any"), now_s)
        return self.handle(client, message, now_s)

    def commit_all(self, now_s: float) -> Outgoing:
        """Begin transactions and, unless the core is slow, finish them."""
        out: Outgoing = []
        while (transaction := self.begin(now_s, is_awaited=False)) is not None:
            self.under_way = transaction
            if self._is_slow:
                break
            out += self.finish(self._failure(), now_s)
        return out

    def finish(self, failure: str = "", now_s: float = 0.0) -> Outgoing:
        """Finish the transaction under way, with or without a failure."""
        assert self.under_way is not None
        self.committed += [] if failure else [self.under_way]
        self.under_way = None
        return self.settle(failure, now_s)

    def contents(self) -> Contents:
        """Return the contents that a file would have by now."""
        entries, announcements, removed, counts = {}, [], [], {}
        for transaction in self.committed:
            entries |= {entry.number: entry for entry in transaction.inserts}
            announcements += transaction.announcements
            for removal in transaction.removals:
                del entries[removal.number]
                removed.append(removal.record_id)
            for key, number in transaction.counts().items():
                counts[key] = counts.get(key, 0) + number
        return Contents(list(entries.values()), announcements, removed, counts, self.intake.last_number)


def put_message(*records: ExperienceRecord, seq: int = 0) -> Put:
    """Make a Put of these records; without `seq`, with a number unlike all before."""
    return put_of_bodies(*map(encode, records), seq=seq)


def put_of_bodies(*bodies: bytes, seq: int = 0) -> Put:
    """Make a Put of these bytes, whatever they are."""
    return Put(client="w", seq=seq or next(_numbers), records=[msgspec.Raw(body) for body in bodies])


def records_of(message: Deliver) -> list[ExperienceRecord]:
    """Decode the records of a delivery."""
    return [decode(bytes(body), experience_decoder) for body in message.records]
