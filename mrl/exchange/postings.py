"""What is on its way to the log: under a number each, so that it is known later where it has come to stand."""

from collections.abc import Iterator, Sequence

from mrl.exchange.entry import Entry
from mrl.exchange.journal import LogEntry, Stored, arrays_of, written
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.outside import Append


class Postings:
    """Tickets of the log's entries, and the records in them."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self._ticket = 0
        self._records: dict[int, tuple[Sequence[Entry], int, bool]] = {}
        """By ticket: the entries, the bytes before the first of their arrays, and whether they are moved."""
        self.is_moving = False
        """Whether records that were moved have not arrived yet."""

    def post(self, message: LogEntry) -> None:
        """Begin to put a message on the log."""
        self._ticket += 1
        self._append(self._ticket, written(message), is_move=False)

    def post_records(self, head: Stored, entries: Sequence[Entry], *, is_move: bool = False) -> int:
        """Begin to put records on the log; returns the ticket."""
        self._ticket += 1
        parts = written(head, arrays_of(entries))
        self._records[self._ticket] = entries, len(parts[0]), is_move
        self.is_moving |= is_move
        self._append(self._ticket, parts, is_move=is_move)
        return self._ticket

    def settle(self, ticket: int, offset: int) -> Iterator[tuple[Entry, int]]:
        """The log has dealt with this ticket. Entries with the places of their arrays, if they stand at `offset`."""
        entries, begin, is_move = self._records.pop(ticket, ((), 0, False))
        self.is_moving &= not is_move
        return _placed(entries, offset + HEAD_BYTES + begin)


def _placed(entries: Sequence[Entry], begin: int) -> Iterator[tuple[Entry, int]]:
    for entry in entries:
        yield entry, begin
        begin += entry.array_bytes
