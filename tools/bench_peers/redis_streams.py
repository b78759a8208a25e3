"""Redis Streams: XADD, then XREADGROUP, XACK and XDEL, all pipelined, with the parser in C.

Settings: `port`, `is_packed` (False: one entry of the stream per record, as Redis is used; True: one per call of the
producer, with all its records in one array, as somebody would do who does by hand what the exchange's client does).
One pipeline of the producer is under way while the next is made; what the consumer has decoded is
acknowledged and deleted in the message that asks for more.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.connection import Connection

from bench_peers.loads import Checklist
from bench_peers.part import DEADLINE_S, Settings, Stamp, stamp
from mrl.records.codec import decode, encode
from mrl.records.experience import ExperienceRecord, experience_decoder, pack_decoder

STREAM, GROUP, FIELD = b"bench", b"readers", b"d"
READ_RECORDS, READ_PACKS, BLOCK_MS = 256, 2, 100


def connect(settings: Settings) -> Connection:
    """A connection, and the group that reads the stream."""
    connection = Connection(host="127.0.0.1", port=settings["port"], protocol=2)
    connection.connect()
    try:
        ask(connection, (b"XGROUP", b"CREATE", STREAM, GROUP, b"0", b"MKSTREAM"))
    except ValueError as error:  # the other process was first
        if "BUSYGROUP" not in str(error):
            raise
    return connection


def ask(connection: Connection, *commands: tuple[object, ...]) -> Any:
    """Send commands at once; returns the answer to the last. Raises ValueError with the error of Redis."""
    tell(connection, commands)
    return [answer(connection) for _ in commands][-1]


def tell(connection: Connection, commands: Sequence[tuple[object, ...]]) -> None:
    """Send commands at once."""
    connection.send_packed_command(connection.pack_commands(commands))


def answer(connection: Connection) -> Any:
    """The answer to the next command. Raises ValueError with the error of Redis."""
    try:
        return connection.read_response(disable_decoding=True)
    except Exception as error:
        raise ValueError(f"Redis answers: {error}") from error


class Producer:
    """Adds a part while the one before it is being stored."""

    def __init__(self, settings: Settings) -> None:
        self._connection = connect(settings)
        self._is_packed = settings["is_packed"]
        self._waiting: deque[tuple[int, int]] = deque()
        """(records, entries) of every pipeline that is under way."""
        self._acknowledged: list[tuple[int, float]] = []

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[ExperienceRecord]:
        """Records are encoded when they are sent."""
        self._acknowledged.clear()
        return records

    def send(self, part: Sequence[ExperienceRecord], *, is_paced: bool) -> None:
        """One pipeline."""
        entries = [msgspec.msgpack.encode(part)] if self._is_packed else [encode(record) for record in part]
        tell(self._connection, [(b"XADD", STREAM, b"*", FIELD, entry) for entry in entries])
        self._waiting.append((len(part), len(entries)))
        while len(self._waiting) > (0 if is_paced else 1):
            self._settle()

    def finish(self) -> None:
        """Read what is still unanswered."""
        while self._waiting:
            self._settle()

    def acknowledgements(self) -> list[tuple[int, float]]:
        """After every pipeline."""
        return list(self._acknowledged)

    def close(self) -> None:
        """End the connection."""
        self._connection.disconnect()

    def _settle(self) -> None:
        """The answers to the oldest pipeline."""
        number, num_entries = self._waiting.popleft()
        for _ in range(num_entries):
            answer(self._connection)
        total = self._acknowledged[-1][0] if self._acknowledged else 0
        self._acknowledged.append((total + number, time.monotonic()))


class Consumer:
    """The only reader of the group."""

    def __init__(self, settings: Settings) -> None:
        self._connection = connect(settings)
        self._is_packed = settings["is_packed"]

    def take_all(self, checklist: Checklist) -> Stamp:
        """Raises RuntimeError after a minute."""
        end_s = time.monotonic() + DEADLINE_S
        limits = (b"COUNT", READ_PACKS if self._is_packed else READ_RECORDS, b"BLOCK", BLOCK_MS)
        read = (b"XREADGROUP", b"GROUP", GROUP, b"one", *limits, b"STREAMS", STREAM, b">")
        done: list[tuple[object, ...]] = []
        while checklist.num_missing:
            found = ask(self._connection, *done, read)
            rows = found[0][1] if found else []
            if self._is_packed:
                for _, fields in rows:
                    checklist.tick_off(decode(fields[1], pack_decoder, max_bytes=len(fields[1])))
            else:
                checklist.tick_off(decode(fields[1], experience_decoder) for _, fields in rows)
            ids = [name for name, _ in rows]
            done = [(b"XACK", STREAM, GROUP, *ids), (b"XDEL", STREAM, *ids)] if ids else []
            if time.monotonic() > end_s:
                raise RuntimeError("records are missing")
        ask(self._connection, *done)
        return stamp()

    def close(self) -> None:
        """End the connection."""
        self._connection.disconnect()
