"""The exchange's core with a log that has everything at once, and what tests say to it and read from it."""

import itertools
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec

from mrl.errors import RecordError
from mrl.exchange.core import ExchangeCore
from mrl.exchange.deliveries import Outgoing
from mrl.exchange.entry import ARRAY_OF_ONE
from mrl.exchange.journal import LogEntry, read
from mrl.exchange.packing import OpenPut
from mrl.records.codec import Buffer, decode, encode
from mrl.records.exchange_messages import Batch, ClientMessage, Deliver, Hello, Put, StatRequest, client_message_decoder
from mrl.records.experience import ExperienceRecord, RecordKind, experience_decoder, kind_of, pack_decoder
from mrl.records.packs import Pack
from mrl.transport.grants import Grant

_numbers = itertools.count(1000)


class LoggedCore(ExchangeCore):
    """What it appends is stored before `handle` returns, the first entry at offset 0, the next at 1, and so on.

    `failure()` says why the log does not take an entry at the moment, "" when it does. With `is_slow` nothing is stored
    before the test says so; it finds the tickets in `posted`. Unless `asked`, nobody has asked for single records yet.
    """

    def __init__(
        self, *, failure: Callable[[], str] = lambda: "", is_slow: bool = False, asked: bool = True, **options: object
    ) -> None:
        settings = {
            "incarnation": "one", "budget_bytes": 1_000_000, "per_prompt": 4, "max_age_versions": 100, "started_s": 0.0,
        }  # fmt: skip
        self.log: list[bytes] = []
        self._failure, self._is_slow = failure, is_slow
        self.posted: list[tuple[int, bytes]] = []
        """Tickets and entries, their parts put together."""
        super().__init__(append=self._post_entry, **settings | options)
        if asked:
            self.memory.index(get_args(RecordKind))

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

    def _post_entry(self, ticket: int, entry: Sequence[Buffer], *, is_move: bool) -> None:
        self.posted.append((ticket, b"".join(entry)))

    def _with_log(self, out: Outgoing, now_s: float) -> Outgoing:
        while self.posted and not self._is_slow:
            ticket, entry = self.posted.pop(0)
            failure, offset = self._failure(), len(self.log)
            self.log += [] if failure else [entry]
            out += self.stored(ticket, offset, failure, now_s)
        return out

    def logged(self) -> list[tuple[int, bytes]]:
        """What a restored core is given, once the last commits have gone on the log too."""
        self._postings.flush()
        self._with_log([], 0.0)
        return list(enumerate(self.log))

    def heads(self) -> list[LogEntry]:
        """What stands on the log, without the records themselves."""
        return [read(entry)[0] for entry in self.log]


def put_message(*records: ExperienceRecord, seq: int = 0) -> Put:
    """A Put of these records; without a number, another one than all before."""
    return put_of_bodies(*((record, encode(record)) for record in records), seq=seq)


def put_of_bodies(*bodies: tuple[ExperienceRecord, bytes], seq: int = 0) -> Put:
    """A Put of packs of one record each: tags like those of the record, and these bytes in its place."""
    return Put(
        client="w", seq=seq or next(_numbers), packs=[pack_of(record, ARRAY_OF_ONE + body) for record, body in bodies]
    )


def packed_message(*records: ExperienceRecord, seq: int = 0) -> Put:
    """A Put as a client makes it: records of the same tags in one pack."""
    put = OpenPut()
    for record in records:
        assert put.add(record) == "taken"
    heads, arrays = put.sealed()
    packs = [msgspec.structs.replace(head, records=msgspec.Raw(a)) for head, a in zip(heads, arrays, strict=True)]
    return Put(client="w", seq=seq or next(_numbers), packs=packs)


def pack_of(record: ExperienceRecord, array: bytes, count: int = 1) -> Pack:
    """A pack with the tags of a record."""
    return Pack(
        type=kind_of(record), oldest=record.oldest, newest=record.newest, task=record.task, count=count,
        num_bytes=len(array), records=msgspec.Raw(array),
    )  # fmt: skip


def batch_records(message: Batch) -> list[ExperienceRecord]:
    """The records that a message of a stream carries."""
    return [record for parcel in message.parcels for record in decode(bytes(parcel.records), pack_decoder)]


def records_of(message: Deliver) -> list[ExperienceRecord]:
    """The records that a message carries."""
    return [decode(bytes(body), experience_decoder) for body in message.records]
