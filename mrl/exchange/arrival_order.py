"""Held records in the order in which they came, so that a reader can go on after any number."""

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence

from mrl.exchange.entry import Entry

MIN_GAPS = 1024
MIN_GAP_BYTES = 4 * 1024 * 1024
MAX_GAP_SHARE = 1 / 8
"""Of what is held: the bodies of entries that left stay in memory until their gaps are closed."""


class ArrivalOrder:
    """A sorted list with gaps: what leaves is marked, and gaps are closed when they are many or weigh much."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._start = 0
        """Index of the first that is held."""
        self._gone: set[int] = set()
        """Numbers of gaps behind it."""
        self._held_bytes = self._gap_bytes = 0

    def add(self, entry: Entry) -> None:
        """Take a newcomer in: almost always the last one, after a restart any."""
        if entry.number in self._gone:
            self._close_gaps()
        self._held_bytes += len(entry.body)
        if self._start < len(self._entries) and entry.number < self._entries[-1].number:
            insort(self._entries, entry, lo=self._start, key=_number_of)
        else:
            self._entries.append(entry)

    def remove(self, entry: Entry) -> None:
        """The entry is held no longer."""
        self._gone.add(entry.number)
        self._held_bytes -= len(entry.body)
        self._gap_bytes += len(entry.body)
        while self._start < len(self._entries) and self._entries[self._start].number in self._gone:
            self._gone.discard(self._entries[self._start].number)
            self._start += 1
        num_gaps = self._start + len(self._gone)
        are_many = num_gaps > MIN_GAPS and 2 * num_gaps > len(self._entries)
        if are_many or self._gap_bytes > max(MIN_GAP_BYTES, MAX_GAP_SHARE * self._held_bytes):
            self._close_gaps()

    def split(self, parts: Mapping[int, Sequence[Entry]]) -> None:
        """Put other entries, with the same numbers, in the place of those that have these numbers."""
        self._close_gaps()
        self._entries = [one for entry in self._entries for one in parts.get(entry.number, (entry,))]
        self._held_bytes = sum(len(entry.body) for entry in self._entries)

    def after(self, number: int) -> Iterator[Entry]:
        """What came later than `number`, in part or whole.

        Neither `add` nor `remove` may be called before the iteration ends.
        """
        for index in range(self._index_after(number), len(self._entries)):
            if self._entries[index].number not in self._gone:
                yield self._entries[index]

    def num_after(self, number: int) -> int:
        """How many entries came later than `number`, gaps among them included."""
        return len(self._entries) - self._index_after(number)

    def _index_after(self, number: int) -> int:
        return bisect_right(self._entries, number, lo=self._start, key=_last_number_of)

    def _close_gaps(self) -> None:
        self._entries = [entry for entry in self._entries[self._start :] if entry.number not in self._gone]
        self._start = self._gap_bytes = 0
        self._gone.clear()


def _number_of(entry: Entry) -> int:
    return entry.number


def _last_number_of(entry: Entry) -> int:
    return entry.last_number
