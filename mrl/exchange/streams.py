"""Streams: all records of some types, sources and tasks, in the order in which they came, each exactly once per reader.

A reader takes batches only in their order and says how far it has come (Took), so one number per stream is all there is
to remember, and a lost batch is sent again from there. What it says once a durable checkpoint has the effect (Commit)
frees the records; a learner that went back to a checkpoint opens the stream at the number that lies in it.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mrl.exchange.entry import Entry
from mrl.exchange.matching import is_within
from mrl.exchange.sessions import Allowance
from mrl.exchange.shelf import Shelf
from mrl.exchange.versions import VersionBook
from mrl.records.exchange_messages import Commit, Stream, StreamState

LAPSE_S = 2.5
"""Living readers repeat themselves every second."""
RESEND_S = 3.0
MAX_STREAMS_PER_POLICY = 16
MAX_STREAMS_PER_KEY = 8
"""Of one policy: what its learners hold leaves room for its workers, and the reverse."""
MAX_STREAMS = 256
MAX_WISHES_BYTES = 16 * 1024 * 1024
"""Names of sources and tasks in memory, of all streams together."""
MAX_BATCH_BYTES = 256 * 1024
MAX_BATCH_ENTRIES = 1024
WINDOW_BYTES = 4 * 1024 * 1024
"""What a reader may have been sent and not taken; one batch is always allowed."""
TOTAL_WINDOW_BYTES = 16 * 1024 * 1024
"""The same of all readers."""
MAX_PASSED_OVER = 10_000
"""Entries of no interest that one call passes over, so that nobody else waits long."""


@dataclass(slots=True)
class _Reading:
    """One stream of one policy."""

    allowance: Allowance
    """Shared with the other streams."""
    holder: str = ""
    """The key that opened or committed it last."""
    committed: int = 0
    took: int = 0
    sent: int = 0
    """Number of the last record sent."""
    looked_at: int = 0
    """Number of the last record that was sent or passed over."""
    client: bytes = b""
    wish: Stream | None = None
    renewed_s: float = 0.0
    reached: int = 0
    """The highest number sent since the reader said where it begins."""
    resend_s: float = 0.0
    """When what was sent and not taken is sent again."""
    is_resending: bool = False
    """Whether the reader left everything untaken: one batch at a time comes again, until it takes one."""
    untaken: list[tuple[int, int]] = field(default_factory=list)
    """(last number, bytes) of every batch that was sent and not taken."""
    untaken_bytes: int = 0

    def begin_at(self, number: int) -> None:
        """The reader says that it has everything up to this number, and nothing later."""
        self.go_to(number)
        self.reached, self.is_resending = number, False

    def go_to(self, number: int) -> None:
        """Whatever was sent later than this number is sent again."""
        self.took = self.sent = self.looked_at = number
        self._leave_untaken([])

    def take(self, upto: int) -> bool:
        """The reader has everything up to this number; False when that was known, or cannot be."""
        if not self.took < upto <= self.reached:
            return False
        self.took, self.is_resending = upto, False
        if upto > self.sent:  # what was to be sent again has come at last
            self.sent, self.looked_at = upto, max(self.looked_at, upto)
        self._leave_untaken([item for item in self.untaken if item[0] > upto])
        return True

    def may_have(self, num_bytes: int) -> bool:
        """Whether the reader may be sent so many bytes more now."""
        if self.is_resending and self.untaken:
            return False
        return self.allowance.admits(self.untaken_bytes, num_bytes)

    def send_upto(self, number: int, num_bytes: int, now_s: float) -> int:
        """The next batch goes out, and ends with this number. Returns what the batch before ended with."""
        if not self.untaken:
            self.resend_s = now_s + RESEND_S
        previous, self.sent, self.reached = self.sent, number, max(number, self.reached)
        self._leave_untaken([*self.untaken, (number, num_bytes)])
        return previous

    def _leave_untaken(self, untaken: list[tuple[int, int]]) -> None:
        num_bytes = sum(num_bytes for _, num_bytes in untaken)
        self.allowance.used_bytes += num_bytes - self.untaken_bytes
        self.untaken, self.untaken_bytes = untaken, num_bytes

    @property
    def freed(self) -> int:
        """Nothing up to this number is needed any more, whether it was sent or passed over."""
        return max(self.committed, self.looked_at) if self.committed >= self.sent else self.committed


@dataclass(frozen=True, slots=True)
class NextBatch:
    """What goes to a reader in one message."""

    client: bytes
    stream: str
    previous: int
    entries: list[Entry]
    reads_log: bool
    """Whether the reader takes the records from the log itself."""


class Streams:
    """Who reads what, and how far it has come."""

    def __init__(self, shelf: Shelf, versions: VersionBook) -> None:
        self._shelf, self._versions = shelf, versions
        self._readings: dict[tuple[str, str], _Reading] = {}
        self._untaken = Allowance(WINDOW_BYTES, TOTAL_WINDOW_BYTES)
        self._wishes_bytes = 0

    def open(self, client: bytes, policy: str, message: Stream, now_s: float) -> bool:
        """Open a stream, or renew it; False when there are too many.

        Where the reader stands, it alone knows: what it said earlier may come later, over a link that was cut off.
        """
        reading = self._reading(policy, message.stream, key_of(client.decode(errors="replace")))
        others_bytes = self._wishes_bytes - (_bytes_of(reading.wish) if reading is not None else 0)
        if reading is None or others_bytes + _bytes_of(message) > MAX_WISHES_BYTES:
            return False
        known = reading.wish if reading.client == client else None
        is_elsewhere = not reading.took <= message.after <= reading.reached
        if known is None or is_elsewhere or message.reads_log != known.reads_log:
            reading.begin_at(message.after)
            self._shelf.number_from(message.after)
        self.take(policy, message.stream, message.after, now_s)
        self._wishes_bytes = others_bytes + _bytes_of(message)
        reading.client, reading.wish, reading.renewed_s = client, message, now_s
        return True

    def take(self, policy: str, stream: str, upto: int, now_s: float) -> None:
        """The reader has everything up to this number."""
        reading = self._readings.get((policy, stream))
        if reading is not None and reading.take(upto):
            reading.resend_s = now_s + RESEND_S

    def commit(self, message: Commit) -> bool:
        """What was taken up to this number may be forgotten; False when that was known."""
        reading = self._reading(message.policy, message.stream, key_of(message.client))
        if reading is None:
            return False
        is_new = message.upto > reading.committed
        reading.committed = max(message.upto, reading.committed)
        return is_new

    def forget(self, client: bytes) -> None:
        """The client reads no longer; what its streams have come to stays."""
        for reading in self._readings.values():
            if reading.client == client:
                self._wishes_bytes -= _bytes_of(reading.wish)
                reading.client, reading.wish = b"", None
                reading.go_to(reading.took)

    def commits(self) -> Iterator[Commit]:
        """What a restored daemon has to know."""
        for (policy, stream), reading in self._readings.items():
            yield Commit(client=reading.holder, policy=policy, stream=stream, upto=reading.committed)

    @property
    def freed(self) -> int:
        """Everything up to this number has been committed by every stream; 0 without streams."""
        return min((reading.freed for reading in self._readings.values()), default=0)

    def batches(self, now_s: float) -> Iterator[NextBatch]:
        """What is to be sent now. The shelf may change between two batches, but not while one is made."""
        for (policy, stream), reading in self._readings.items():
            if reading.wish is None or now_s - reading.renewed_s > LAPSE_S:
                continue
            if reading.untaken and now_s >= reading.resend_s:
                reading.go_to(reading.took)
                reading.is_resending = True
            while batch := self._next(policy, stream, reading, reading.wish, now_s):
                yield batch

    def _reading(self, policy: str, stream: str, holder: str) -> _Reading | None:
        """The stream of this name, known or new; None when there are too many that are read or were committed."""
        known = self._readings.get((policy, stream))
        if known is not None and known.holder == holder:
            return known
        if not self._has_room(policy, holder, is_new=known is None):
            return None
        reading = known or self._readings.setdefault((policy, stream), _Reading(self._untaken))
        reading.holder = holder
        return reading

    def _has_room(self, policy: str, holder: str, *, is_new: bool) -> bool:
        """Whether a key may hold one stream more; one that nobody needs may go for it."""
        of_policy = [key for key in self._readings if key[0] == policy]
        of_key = [key for key in of_policy if self._readings[key].holder == holder]
        if len(of_key) >= MAX_STREAMS_PER_KEY:
            return self._drop_unused(of_key)
        is_full = len(of_policy) >= MAX_STREAMS_PER_POLICY or len(self._readings) >= MAX_STREAMS
        return not (is_new and is_full) or self._drop_unused(of_policy)

    def _drop_unused(self, keys: Iterable[tuple[str, str]]) -> bool:
        """Forget the first of these that is neither read nor was committed; False when there is none."""
        unused = (key for key in keys if not (self._readings[key].client or self._readings[key].committed))
        if (key := next(unused, None)) is None:
            return False
        del self._readings[key]
        return True

    def states(self) -> list[StreamState]:
        """All streams, for display."""
        return [
            StreamState(
                policy=policy,
                stream=stream,
                reader=reading.client.decode(errors="replace"),
                sent=reading.sent,
                took=reading.took,
                committed=reading.committed,
                waiting=self._shelf.num_after(reading.looked_at),
            )
            for (policy, stream), reading in sorted(self._readings.items())
        ]

    def _next(self, policy: str, stream: str, reading: _Reading, wish: Stream, now_s: float) -> NextBatch | None:
        """The next batch of one stream within its window."""
        if not reading.may_have(MAX_BATCH_BYTES):
            return None
        entries: list[Entry] = []
        num_bytes = 0
        for passed, entry in enumerate(self._shelf.after(reading.looked_at)):
            if passed == MAX_PASSED_OVER:
                break
            if self._is_wanted(entry, policy, wish):
                if entries and (num_bytes + len(entry.body) > MAX_BATCH_BYTES or len(entries) == MAX_BATCH_ENTRIES):
                    break
                entries.append(entry)
                num_bytes += len(entry.body)
            reading.looked_at = entry.last_number
        if not entries:
            return None
        previous = reading.send_upto(entries[-1].last_number, num_bytes, now_s)
        return NextBatch(reading.client, stream, previous, entries, reads_log=wish.reads_log)

    def _is_wanted(self, entry: Entry, policy: str, wish: Stream) -> bool:
        tags = entry.tags
        return (
            tags.source != policy
            and tags.type in wish.kinds
            and tags.is_for(policy)
            and (not wish.sources or tags.source in wish.sources)
            and (not wish.tasks or tags.task in wish.tasks)
            and is_within(self._versions.age(tags), wish.max_age_versions)
        )


def key_of(client: str) -> str:
    """A policy has one key per role, and its clients are named after it: "learner" for "learner/qwen"."""
    return client.partition("/")[0]


def _bytes_of(wish: Stream | None) -> int:
    """Memory that the names in it take."""
    return sum(map(sys.getsizeof, (*wish.sources, *wish.tasks))) if wish is not None else 0
