"""Transactions: changes of the file that are committed together, and the answers that depend on them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.exchange.record_index import Entry
from mrl.records.exchange_messages import Announce


class Judged(NamedTuple):
    """The outcome of one Put, which holds once its records are in the file."""

    client: bytes
    policy: str
    seq: int
    num_stored: int
    refused: Counter[str]
    """Reason -> number of records that are not stored."""


class Removal(NamedTuple):
    """A record that is held no longer."""

    number: int
    record_id: str
    source: str
    kind: str
    reason: str
    """Why the record was removed: stale, void, surpassed, full, or served. Only served is no eviction."""


@dataclass(slots=True)
class Transaction:
    """Changes of the file that are committed as a whole or not at all."""

    puts: list[Judged] = field(default_factory=list)
    inserts: list[Entry] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    announcements: list[Announce] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes of the records in the Puts."""

    @property
    def is_empty(self) -> bool:
        """Whether the transaction changes nothing, and no client waits for it."""
        return not (self.puts or self.removals or self.announcements)

    @property
    def is_awaited(self) -> bool:
        """Whether a client waits for the transaction."""
        return bool(self.puts)

    def counts(self) -> Counter[tuple[str, str, str]]:
        """Return (policy, "stored" | "refused" | "removed", reason) -> number of records."""
        counts = Counter((entry.tags.source, "stored", "") for entry in self.inserts)
        counts.update((removal.source, "removed", removal.reason) for removal in self.removals)
        for put in self.puts:
            counts.update({(put.policy, "refused", reason): number for reason, number in put.refused.items()})
        return counts
