"""What is on its way to the log: under a number each, so that it is known later where it has come to stand."""

from collections.abc import Iterator, Sequence

from mrl.exchange.entry import Entry
from mrl.exchange.journal import LogEntry, Stored, arrays_of, written
from mrl.exchange.log.frames import HEAD_BYTES
from mrl.exchange.outside import Append
from mrl.records.exchange_messages import Commit


class Postings:
    """Tickets of the log's entries, and the records in them."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self._ticket = 0
        self._commits: dict[tuple[str, str], Commit] = {}
        """By policy and stream."""
        self._records: dict[int, tuple[Sequence[Entry], int, bool]] = {}
        """By ticket: the entries, the bytes before the first of their arrays, and whether they are moved."""
        self.is_moving = False
        """Whether records that were moved have not arrived yet."""

    def post(self, message: LogEntry) -> None:
        """Begin to put a message on the log."""
        self._ticket += 1
        self._append(self._ticket, written(message), is_move=False)

    def post_later(self, commit: Commit) -> None:
        """Put a commit on the log with the next records, or at the next `flush`: the disk is not waited for on its own.

        Nobody is told when the log has it, and its sender repeats it. Only the last one of a stream counts.
        """
        self._commits[commit.policy, commit.stream] = commit

    def flush(self) -> None:
        """Begin to put on the log what has waited."""
        for commit in self._commits.values():
            self.post(commit)
        self._commits.clear()

    def post_records(self, head: Stored, entries: Sequence[Entry], *, is_move: bool = False) -> int:
        """Begin to put records on the log; returns the ticket."""
        self._ticket += 1
        parts = written(head, arrays_of(entries))
        self._records[self._ticket] = entries, len(parts[0]), is_move
        self.is_moving |= is_move
        ticket = self._ticket
        self._append(ticket, parts, is_move=is_move)
        self.flush()
        return ticket

    def settle(self, ticket: int, offset: int) -> Iterator[tuple[Entry, int]]:
        """The log has dealt with this ticket. Entries with the places of their arrays, if they stand at `offset`."""
        entries, begin, is_move = self._records.pop(ticket, ((), 0, False))
        self.is_moving &= not is_move
        return _placed(entries, offset + HEAD_BYTES + begin)


def _placed(entries: Sequence[Entry], begin: int) -> Iterator[tuple[Entry, int]]:
    for entry in entries:
        yield entry, begin
        begin += entry.array_bytes
