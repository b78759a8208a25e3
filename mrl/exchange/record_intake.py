"""Puts between arrival and acknowledgement: judgement of their records, and transactions on their way to the file.

A record is acknowledged when its transaction is committed, and not before. Everything that comes while a transaction is
under way goes with the next one. When a transaction fails, its Puts and those of the next one are answered with Later.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from mrl.exchange.limits import Limits
from mrl.exchange.record_index import Entry, RecordIndex
from mrl.exchange.transaction import Judged, Removal, Transaction
from mrl.exchange.versions import VersionTracker
from mrl.records.exchange_messages import Announce, Put
from mrl.records.tags import Tags, tags_of

RETRY_S = 1.0
"""Seconds after a failure until the disk is tried again, if need be with an empty transaction."""
BUSY = "busy"
"""Reason why a Put is not taken while too many bytes are under way."""


class RecordIntake:
    """Judges Puts, and gathers their records into transactions: one under way, and the next."""

    def __init__(self, limits: Limits, index: RecordIndex, versions: VersionTracker) -> None:
        self.storage = ""
        """Why nothing is stored at the moment; "" when all is well."""
        self.num_later = 0
        """Puts that were answered with Later."""
        self.last_number = 0
        """Highest number that was given to a record."""
        self._limits, self._index, self._versions = limits, index, versions
        self._next = Transaction()
        self._under_way: Transaction | None = None
        self._puts: set[tuple[bytes, int]] = set()
        """Puts that are not committed: (client, seq)."""
        self._ids: set[str] = set()
        """Ids of records that are not committed."""
        self._retry_s = 0.0
        self._remembered: OrderedDict[str, None] = OrderedDict()
        """Ids of removed records, the newest at the end."""

    @property
    def num_unstored(self) -> int:
        """Number of Puts that are not committed."""
        return len(self._puts)

    def take(self, client: bytes, policy: str, put: Put, now_s: float) -> str:
        """Judge a Put for the next transaction. Returns "" when it is taken, else why it has to come again."""
        if (client, put.seq) in self._puts:
            return ""
        num_bytes = sum(len(memoryview(raw)) for raw in put.records)
        under_way_bytes = self._next.num_bytes + (self._under_way.num_bytes if self._under_way else 0)
        if self.storage and (now_s < self._retry_s or self._puts):
            self.num_later += 1
            return self.storage
        if under_way_bytes and under_way_bytes + num_bytes > self._limits.unstored_bytes:
            self.num_later += 1
            return BUSY
        self._judge(client, policy, put)
        self._next.num_bytes += num_bytes
        return ""

    def note_removal(self, entry: Entry, reason: str) -> None:
        """Let the next transaction delete a record that is held no longer."""
        tags = entry.tags
        self._next.removals.append(Removal(entry.number, tags.record_id, tags.source, tags.type, reason))
        self.remember([tags.record_id])

    def note_announcement(self, message: Announce) -> None:
        """Let the next transaction store an announcement."""
        self._next.announcements.append(message)

    def begin(self, now_s: float, *, is_awaited: bool) -> Transaction | None:
        """Start the next transaction and return it.

        Returns None while a transaction is under way, when there is nothing to do, and when it is too early to try
        again. With `is_awaited` also when no client waits for the next one. After a failure the transaction may be
        empty: whether the file can be written again has to be found out even when nothing is put.
        """
        is_early = bool(self.storage) and now_s < self._retry_s
        if self._under_way is not None or is_early or (self._next.is_empty and not self.storage):
            return None
        if is_awaited and not self._next.is_awaited:
            return None
        self._under_way, self._next = self._next, Transaction()
        return self._under_way

    def settle(self, failure: str, now_s: float) -> tuple[Transaction, list[Judged]]:
        """End the transaction under way, which was committed or failed.

        Returns what was committed, and the Puts that failed.
        """
        done = self._under_way
        assert done is not None
        self._under_way, self.storage = None, failure
        if not failure:
            self._puts.difference_update((put.client, put.seq) for put in done.puts)
            self._ids.difference_update(entry.record_id for entry in done.inserts)
            return done, []
        self._retry_s = now_s + RETRY_S
        failed = done.puts + self._next.puts
        self.num_later += len(failed)
        self._puts.clear()
        self._ids.clear()
        self._next = Transaction(
            removals=done.removals + self._next.removals, announcements=done.announcements + self._next.announcements
        )
        return Transaction(), failed

    def remember(self, record_ids: Iterable[str]) -> None:
        """Refuse these records from now on: they were stored once. Only the newest ids are remembered."""
        for record_id in record_ids:
            self._remembered[record_id] = None
            if len(self._remembered) > self._limits.remembered_ids:
                self._remembered.popitem(last=False)

    def fault_of_age(self, tags: Tags) -> str:
        """Return why a record of these versions is of no use any more, or ""."""
        if self._versions.is_void(tags):
            return "void"
        return "stale" if self._versions.age(tags) > self._limits.max_age_versions else ""

    def _judge(self, client: bytes, policy: str, put: Put) -> None:
        refused: Counter[str] = Counter()
        num_stored = 0
        for raw in put.records:
            tags = tags_of(memoryview(raw))
            if reason := "invalid" if tags is None else self._fault(tags, len(memoryview(raw)), policy):
                refused[reason] += 1
            elif tags is not None:
                self.last_number += 1
                num_stored += 1
                self._ids.add(tags.record_id)
                # A copy: a part of the message would keep all of it in memory.
                self._next.inserts.append(Entry(self.last_number, tags, bytes(raw)))
        self._puts.add((client, put.seq))
        self._next.puts.append(Judged(client, policy, put.seq, num_stored, refused))

    def _fault(self, tags: Tags, num_bytes: int, policy: str) -> str:
        """Return why a record is refused; "" when it is taken."""
        if tags.source != policy:
            return "foreign"
        record_id = tags.record_id
        if record_id in self._ids or record_id in self._index or record_id in self._remembered:
            return "duplicate"
        return self.fault_of_age(tags) or ("" if self._limits.fits(num_bytes) else "too_large")
