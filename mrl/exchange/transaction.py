"""What is committed to the file at once, and the answers that depend on it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.exchange.record_index import Entry
from mrl.records.exchange_messages import Announce


class Judged(NamedTuple):
    """What becomes of one Put, once its records are in the file."""

    client: bytes
    policy: str
    seq: int
    num_stored: int
    refused: Counter[str]
    """Records that are not stored, by reason."""


class Removal(NamedTuple):
    """A record that is held no longer."""

    number: int
    record_id: str
    source: str
    kind: str
    reason: str
    """stale, void, surpassed, full, or served: only the last is no eviction."""


@dataclass(slots=True)
class Transaction:
    """Done as a whole or not at all."""

    puts: list[Judged] = field(default_factory=list)
    inserts: list[Entry] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    announcements: list[Announce] = field(default_factory=list)
    num_bytes: int = 0
    """Length of the Puts."""

    @property
    def is_empty(self) -> bool:
        """Whether the file stays as it is, and nobody waits for an answer."""
        return not (self.puts or self.removals or self.announcements)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self.puts)

    def counts(self) -> Counter[tuple[str, str, str]]:
        """(policy, "stored" | "refused" | "removed", reason) -> records."""
        counts = Counter((entry.tags.source, "stored", "") for entry in self.inserts)
        counts.update((removal.source, "removed", removal.reason) for removal in self.removals)
        for put in self.puts:
            counts.update({(put.policy, "refused", reason): number for reason, number in put.refused.items()})
        return counts
