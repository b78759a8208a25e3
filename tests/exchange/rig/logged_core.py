"""The exchange's core with a log that has everything at once, and what tests say to it and read from it."""

from collections.abc import Callable

import msgspec

from mrl.errors import RecordError
from mrl.exchange.core import ExchangeCore
from mrl.exchange.deliveries import Outgoing
from mrl.exchange.journal import LogEntry, log_entry_decoder
from mrl.records.codec import decode, encode
from mrl.records.exchange import ClientMessage, Deliver, Hello, Put, StatRequest, client_message_decoder
from mrl.records.experience import ExperienceRecord, experience_decoder
from mrl.transport.grants import Grant


class LoggedCore(ExchangeCore):
    """What it appends is stored before `handle` returns, the first entry at offset 0, the next at 1, and so on.

    `failure()` says why the log does not take an entry at the moment, "" when it does. With `is_slow` nothing is stored
    before the test says so; it finds the tickets in `posted`.
    """

    def __init__(self, *, failure: Callable[[], str] = lambda: "", is_slow: bool = False, **options: object) -> None:
        settings = {
            "incarnation": "one", "budget_bytes": 1_000_000, "per_prompt": 4, "max_age_versions": 100, "started_s": 0.0,
        }  # fmt: skip
        self.log: list[bytes] = []
        self._failure, self._is_slow = failure, is_slow
        self.posted: list[tuple[int, bytes]] = []
        super().__init__(append=self._post_entry, **settings | options)

    def handle(self, client: bytes, message: ClientMessage, now_s: float, *, policy: str = "") -> Outgoing:
        """Act, and let the log finish. The client's key is of `policy`, or of whatever policy it says it is."""
        told = message.policy if isinstance(message, Hello) else "any"
        grant = Grant("admin") if isinstance(message, StatRequest) else Grant("worker", policy or told)
        return self._with_log(super().handle(client, message, grant, now_s), now_s)

    def receive_body(self, client: bytes, body: bytes, now_s: float) -> Outgoing:
        """The same for a message as it comes over the wire."""
        try:
            message = decode(body, client_message_decoder)
        except RecordError:
            return self.receive(client, body, Grant("worker", "any"), now_s)
        return self.handle(client, message, now_s)

    def _post_entry(self, ticket: int, entry: bytes, *, is_move: bool) -> None:
        self.posted.append((ticket, entry))

    def _with_log(self, out: Outgoing, now_s: float) -> Outgoing:
        while self.posted and not self._is_slow:
            ticket, entry = self.posted.pop(0)
            failure, offset = self._failure(), len(self.log)
            self.log += [] if failure else [entry]
            out += self.stored(ticket, offset, failure, now_s)
        return out

    def logged(self) -> list[tuple[int, LogEntry]]:
        """What a restored core is given."""
        return [(offset, decode(entry, log_entry_decoder)) for offset, entry in enumerate(self.log)]


def put_message(*records: ExperienceRecord, seq: int = 1) -> Put:
    """A Put of these records."""
    return Put(client="w", seq=seq, records=[msgspec.Raw(encode(record)) for record in records])


def records_of(message: Deliver) -> list[ExperienceRecord]:
    """The records that a message carries."""
    return [decode(bytes(body), experience_decoder) for body in message.records]
