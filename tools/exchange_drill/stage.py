"""The exchange's core without socket, clock or disk, for input that wants to break it: what has to hold whatever comes.

Input is bytes: pieces of one byte for the client, two for the length, and the body of one message. What is cut short at
the end is a piece as well, so that every input means something.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mrl.exchange.core import ExchangeCore
from mrl.exchange.deliveries import Outgoing
from mrl.exchange.memory import Memory
from mrl.records.codec import MAX_MESSAGE_BYTES, Buffer, decode, encode
from mrl.records.exchange_messages import Hello, daemon_message_decoder
from mrl.transport.grants import Grant

BUDGET_BYTES = 16 * 1024
MAX_PIECES = 64
STEP_S = 0.7
POLICIES = ("qwen", "llama")
CLIENTS: Sequence[tuple[bytes, Grant]] = (
    (b"worker/qwen/0", Grant("worker", "qwen")),
    (b"learner/llama", Grant("learner", "llama")),
    (b"worker/llama/0", Grant("worker", "llama")),
    (b"learner/qwen", Grant("learner", "qwen")),
    (b"admin", Grant("admin")),
)
PER_PROMPT, MAX_AGE_VERSIONS = 2, 8


@dataclass
class _Log:
    """Has everything that it is given at once; every seventh time there is no room."""

    entries: list[bytes] = field(default_factory=list)
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    num_asked: int = 0

    def append(self, ticket: int, entry: Sequence[Buffer], *, is_move: bool) -> None:
        """Keep it until the core has returned."""
        self.waiting.append((ticket, b"".join(entry)))

    def settle(self) -> Iterator[tuple[int, int, str]]:
        """(ticket, offset, failure) of whatever waits."""
        while self.waiting:
            ticket, entry = self.waiting.pop(0)
            self.num_asked += 1
            failure = "" if self.num_asked % 7 else "disk_full"
            self.entries += [] if failure else [entry]
            yield ticket, len(self.entries) - 1, failure


class Stage:
    """A core whose clients have all said Hello."""

    def __init__(self, *, when_full: str) -> None:
        self._log, self._now_s, self._when_full = _Log(), 0.0, when_full
        self.core = ExchangeCore(
            incarnation="stage",
            budget_bytes=BUDGET_BYTES,
            per_prompt=PER_PROMPT,
            max_age_versions=MAX_AGE_VERSIONS,
            when_full=when_full,  # type: ignore[arg-type]
            append=self._log.append,
            started_s=0.0,
            max_watches_per_client=64,
            max_watches=128,
        )
        for client, grant in CLIENTS:
            if grant.policy:
                self.say(client, grant, encode(Hello(client=grant.name, policy=grant.policy)))

    def say(self, client: bytes, grant: Grant, body: bytes) -> list[bytes]:
        """One message, and all that follows from it. Returns the answers; raises AssertionError when one is wrong."""
        self._now_s += STEP_S
        out = self.core.receive(client, body, grant, self._now_s)
        for ticket, offset, failure in self._log.settle():
            out = out + self.core.stored(ticket, offset, failure, self._now_s)
        assert self.core.shelf.used_bytes <= BUDGET_BYTES, f"{self.core.shelf.used_bytes} bytes are held"
        return checked(out)

    def rest(self) -> None:
        """Time passes; then a new daemon reads the log, and knows what this one knew."""
        for wait_s in (0.1, 5.0, 100.0):
            self._now_s += wait_s
            out = self.core.tick(self._now_s)
            for ticket, offset, failure in self._log.settle():
                out = out + self.core.stored(ticket, offset, failure, self._now_s)
            checked(out)
        checked([(b"admin", self.core.stat(self._now_s))])
        again = self._restored()
        held, found = numbers_in(self.core.memory), numbers_in(again)
        assert held <= found, f"records {held - found} are not held after a restart"
        again.snapshot()

    def _restored(self) -> Memory:
        memory = Memory(
            budget_bytes=2 * BUDGET_BYTES,
            per_prompt=2 * PER_PROMPT,
            max_age_versions=MAX_AGE_VERSIONS,
            when_full=self._when_full,  # type: ignore[arg-type]
        )
        memory.restore(None, enumerate(self._log.entries))
        return memory


def numbers_in(memory: Memory) -> set[int]:
    """Numbers of the records that are held, in packs or not."""
    return {number for entry in memory.shelf.entries() for number in range(entry.number, entry.last_number + 1)}


def checked(out: Outgoing) -> list[bytes]:
    """The encoded messages. Raises AssertionError unless each goes to a client, fits, and can be read there."""
    bodies = []
    for client, message in out:
        assert client in dict(CLIENTS), f"an answer to {client!r}"
        body = encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"an answer of {len(body)} bytes"
        decode(body, daemon_message_decoder)
        bodies.append(body)
    return bodies


def pieces(data: bytes) -> list[tuple[int, bytes]]:
    """(client, body) of every message, at most 64."""
    found = []
    while data and len(found) < MAX_PIECES:
        head, data = data[:3].ljust(3, b"\0"), data[3:]
        client, length = struct.unpack("<BH", head)
        found.append((client % len(CLIENTS), data[:length]))
        data = data[length:]
    return found


def joined(messages: Iterable[tuple[int, bytes]]) -> bytes:
    """The input that consists of these messages."""
    return b"".join(struct.pack("<BH", client, len(body)) + body for client, body in messages)


def play(data: bytes) -> None:
    """Say all of it to a daemon that evicts and to one that refuses. Raises whatever they raise."""
    for when_full in ("evict", "refuse"):
        stage = Stage(when_full=when_full)
        for number, body in pieces(data):
            client, grant = CLIENTS[number]
            stage.say(client, grant, body)
        stage.rest()
