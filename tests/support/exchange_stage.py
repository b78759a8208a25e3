"""The exchange's core without socket, clock or disk, under hostile input, with checks that hold for any input.

Input is bytes: pieces of one byte for the client, two for the length, and the body of one message. A piece that is cut
short at the end counts too, so that every input means something.
"""

import struct
from collections.abc import Iterable, Sequence

from mrl.exchange.contents import Contents
from mrl.exchange.core import ExchangeCore, Outgoing
from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry
from mrl.records.codec import MAX_MESSAGE_BYTES, decode, encode
from mrl.records.exchange_messages import Announce, Hello, daemon_message_decoder
from mrl.transport.grants import Grant

BUDGET_BYTES = 16 * 1024
MAX_PIECES = 64
STEP_S = 0.7
LIMITS = Limits(
    budget_bytes=BUDGET_BYTES, successes_per_prompt=2, max_age_versions=8, watches_per_client=64, watches_bytes=128_000
)
CLIENTS: Sequence[tuple[bytes, Grant]] = (
    (b"worker/qwen/0", Grant("worker", "qwen")),
    (b"learner/llama", Grant("learner", "llama")),
    (b"worker/llama/0", Grant("worker", "llama")),
    (b"learner/qwen", Grant("learner", "qwen")),
    (b"admin", Grant("admin")),
)


class Stage:
    """A core whose clients have all said Hello, with a file that has no room every seventh time."""

    def __init__(self) -> None:
        self._now_s, self._num_commits = 0.0, 0
        self._entries: dict[int, Entry] = {}
        self._announced: list[Announce] = []
        self.core = ExchangeCore(LIMITS, incarnation="stage", started_s=0.0)
        for client, grant in CLIENTS:
            if grant.policy:
                self.say(client, grant, encode(Hello(client=grant.name, policy=grant.policy)))

    def say(self, client: bytes, grant: Grant, body: bytes) -> list[bytes]:
        """Hand the core one message and commit; return the answers. Raises AssertionError when one is wrong."""
        self._now_s += STEP_S
        out = self.core.receive(client, body, grant, self._now_s) + self._commit()
        assert self.core.index.used_bytes <= BUDGET_BYTES, f"{self.core.index.used_bytes} bytes are held"
        return checked(out)

    def rest(self) -> None:
        """Let time pass; then check that a new core, restored from the file, holds the records that this one held."""
        for wait_s in (0.1, 5.0, 100.0):
            self._now_s += wait_s
            checked(self.core.tick(self._now_s) + self._commit())
        checked([(b"admin", self.core.stat(self._now_s))])
        held = {entry.number for entry in self.core.index.entries()}
        assert held <= self._entries.keys(), f"records {held - self._entries.keys()} are held and not in the file"
        again = ExchangeCore(LIMITS, incarnation="again", started_s=0.0)
        again.restore(Contents(list(self._entries.values()), self._announced, [], {}, max(self._entries, default=0)))
        found = {entry.number for entry in again.index.entries()}
        assert held <= found, f"records {held - found} are not held after a restart"

    def _commit(self) -> Outgoing:
        out: Outgoing = []
        while (transaction := self.core.begin(self._now_s, is_awaited=False)) is not None:
            self._num_commits += 1
            failure = "" if self._num_commits % 7 else "disk_full"
            if not failure:
                self._entries |= {entry.number: entry for entry in transaction.inserts}
                self._announced += transaction.announcements
                for removal in transaction.removals:
                    del self._entries[removal.number]
            out += self.core.settle(failure, self._now_s)
        return out


def checked(out: Outgoing) -> list[bytes]:
    """Encode messages. Raises AssertionError unless each goes to a client, fits, and can be decoded there."""
    bodies = []
    for client, message in out:
        assert client in dict(CLIENTS), f"an answer to {client!r}"
        body = encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"an answer of {len(body)} bytes"
        decode(body, daemon_message_decoder)
        bodies.append(body)
    return bodies


def pieces(data: bytes) -> list[tuple[int, bytes]]:
    """(client, body) of every message of an input, at most `MAX_PIECES`."""
    found: list[tuple[int, bytes]] = []
    while data and len(found) < MAX_PIECES:
        head, data = data[:3].ljust(3, b"\0"), data[3:]
        client, length = struct.unpack("<BH", head)
        found.append((client % len(CLIENTS), data[:length]))
        data = data[length:]
    return found


def joined(messages: Iterable[tuple[int, bytes]]) -> bytes:
    """Input that consists of these messages."""
    return b"".join(struct.pack("<BH", client, len(body)) + body for client, body in messages)


def play(data: bytes) -> None:
    """Hand all messages of an input to a core. Raises whatever the core raises."""
    stage = Stage()
    for number, body in pieces(data):
        client, grant = CLIENTS[number]
        stage.say(client, grant, body)
    stage.rest()
