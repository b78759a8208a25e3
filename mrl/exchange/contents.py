"""What a daemon finds in its file when it starts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mrl.exchange.record_index import Entry
from mrl.records.exchange_messages import Announce


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that was committed, in the order in which it came."""

    entries: Iterable[Entry]
    announcements: Iterable[Announce]
    removed_ids: Iterable[str]
    """Of records that are held no longer, the newest at the end."""
    counts: Mapping[tuple[str, str, str], int]
    """As `Transaction.counts`, of all transactions together."""
    last_number: int
    """The highest that a record ever had, as far as is known."""
