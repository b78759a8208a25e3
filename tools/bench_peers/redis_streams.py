"""Redis Streams in the benchmark, with pipelined commands and the client's parser in C.

Each record goes into the stream of its prompt (XADD, at most one entry per prompt: the newest is the least stale),
where a reader of that prompt finds it by XRANGE, and the prompt goes into a stream of news. A consumer reads the news
(XREAD with BLOCK) and fetches the records of the prompts that it awaits. A record is deleted only when a newer one of
its prompt replaces it. Settings: `port`.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.connection import Connection

from bench_peers.loads import Checklist
from bench_peers.part import DEADLINE_S, Settings, Stamp, stamp
from mrl.records.codec import decode, encode
from mrl.records.experience import ExperienceRecord, experience_decoder

NEWS, BODY, PROMPT = b"news", b"d", b"p"
READ_RECORDS, BLOCK_MS = 256, 100


def connect(settings: Settings) -> Connection:
    """Connect to the server."""
    connection = Connection(host="127.0.0.1", port=settings["port"], protocol=2)
    connection.connect()
    return connection


def tell(connection: Connection, commands: Sequence[tuple[object, ...]]) -> None:
    """Send commands in one pipeline."""
    connection.send_packed_command(connection.pack_commands(commands))


def answer(connection: Connection) -> Any:
    """Return the answer to the next command. Raises ValueError with the error of Redis."""
    try:
        return connection.read_response(disable_decoding=True)
    except Exception as error:
        raise ValueError(f"Redis answers: {error}") from error


def key_of(prompt_id: str | bytes) -> bytes:
    """Key of a prompt's stream."""
    return b"prompt:" + (prompt_id if isinstance(prompt_id, bytes) else prompt_id.encode())


class Producer:
    """Producer that sends a part while Redis stores the part before it."""

    def __init__(self, settings: Settings) -> None:
        self._connection = connect(settings)
        self._waiting: deque[int] = deque()
        """Number of records of each pipeline that is not answered yet."""
        self._acknowledged: list[tuple[int, float]] = []

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[ExperienceRecord]:
        """Return the records unchanged; they are encoded when they are sent."""
        self._acknowledged.clear()
        return records

    def send(self, part: Sequence[ExperienceRecord], *, is_paced: bool) -> None:
        """Send the records in one pipeline."""
        commands: list[tuple[object, ...]] = []
        for record in part:
            commands.append((b"XADD", key_of(record.prompt_id), b"MAXLEN", 1, b"*", BODY, encode(record)))
            commands.append((b"XADD", NEWS, b"*", PROMPT, record.prompt_id.encode()))
        tell(self._connection, commands)
        self._waiting.append(len(part))
        while len(self._waiting) > (0 if is_paced else 1):
            self._settle()

    def finish(self) -> None:
        """Read the answers that are still missing."""
        while self._waiting:
            self._settle()

    def acknowledgements(self) -> list[tuple[int, float]]:
        """See bench_peers.part.Producer; an entry for every pipeline."""
        return list(self._acknowledged)

    def close(self) -> None:
        """End the connection."""
        self._connection.disconnect()

    def _settle(self) -> None:
        """Read the answers to the oldest pipeline."""
        number = self._waiting.popleft()
        for _ in range(2 * number):
            answer(self._connection)
        total = self._acknowledged[-1][0] if self._acknowledged else 0
        self._acknowledged.append((total + number, time.monotonic()))


class Consumer:
    """Consumer that reads the news, and the records of the prompts that it awaits."""

    def __init__(self, settings: Settings) -> None:
        self._connection = connect(settings)
        self._last = b"0"

    def take_all(self, checklist: Checklist) -> Stamp:
        """Take records until none is missing; return that moment. Raises RuntimeError after `DEADLINE_S`."""
        end_s = time.monotonic() + DEADLINE_S
        awaited = {name.encode() for name in checklist.ids}
        while checklist.num_missing:
            read = (b"XREAD", b"COUNT", READ_RECORDS, b"BLOCK", BLOCK_MS, b"STREAMS", NEWS, self._last)
            tell(self._connection, [read])
            found = answer(self._connection)
            rows = found[0][1] if found else []
            self._last = rows[-1][0] if rows else self._last
            wanted = [fields[1] for _, fields in rows if fields[1] in awaited]
            tell(self._connection, [(b"XRANGE", key_of(prompt_id), b"-", b"+") for prompt_id in wanted])
            for _ in wanted:
                checklist.tick_off(decode(fields[1], experience_decoder) for _, fields in answer(self._connection))
            if time.monotonic() > end_s:
                raise RuntimeError("records are missing")
        return stamp()

    def close(self) -> None:
        """End the connection."""
        self._connection.disconnect()
