"""The committed contents of the exchange's file, as a daemon finds them when it starts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mrl.exchange.record_index import Entry
from mrl.records.exchange_messages import Announce


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that was committed; the entries in order of arrival."""

    entries: Iterable[Entry]
    announcements: Iterable[Announce]
    removed_ids: Iterable[str]
    """Ids of records that are held no longer, the newest removal at the end."""
    counts: Mapping[tuple[str, str, str], int]
    """Counts of all transactions together, in the form of `Transaction.counts`."""
    last_number: int
    """Highest number that a record ever had, as far as the file knows."""
