"""What comes from the daemon, decoded and sorted out: new or not, readable or not, in its place in a stream."""

from collections import Counter
from collections.abc import Sequence

from mrl.errors import RecordError
from mrl.exchange.inbox import Inbox
from mrl.exchange.reader import LogLost, Reader
from mrl.exchange.shared_files import SharedFiles
from mrl.records.codec import decode
from mrl.records.exchange_messages import Batch, ClientMessage, Commit, Deliver, Stream, Took
from mrl.records.experience import ExperienceRecord, experience_decoder
from mrl.records.tags import tags_of


class Arrivals:
    """Inbox and streams of one client. Adds to `counts`: received, unreadable."""

    def __init__(self, counts: Counter[str], files: SharedFiles) -> None:
        self.inbox = Inbox()
        self._readers: dict[str, Reader] = {}
        self._commits: dict[str, Commit] = {}
        self._counts, self._files = counts, files

    def open(self, wish: Stream) -> Stream:
        """Batches of this stream are expected from now on; returns what the daemon is to be told."""
        reader = self._readers[wish.stream] = Reader(wish, self._files)
        return reader.wish

    def commit(self, message: Commit) -> None:
        """Said again until the next one, because nobody acknowledges it."""
        self._commits[message.stream] = message

    def standing(self) -> list[ClientMessage]:
        """What a daemon should know of the streams at any time."""
        return [*(reader.wish for reader in self._readers.values()), *self._commits.values()]

    def take_in(self, message: Deliver) -> list[str]:
        """Ids of the delivered records about which nothing more has to be done."""
        done = []
        for raw, age_versions in zip(message.records, message.ages_versions, strict=False):
            body = bytes(raw)
            record = self._decoded(body)
            if record is None:
                tags = tags_of(body)
                done += [tags.record_id] if tags is not None else []
                continue
            self._counts["received"] += self.inbox.put(record, age_versions, len(body))
            done += [record.record_id] if self.inbox.has_seen(record) else []
        return done

    def read(self, batch: Batch) -> Sequence[Took | Stream]:
        """Take a batch whole or not at all: what is not taken comes again. Returns what the daemon has to know."""
        reader = self._readers.get(batch.stream)
        if reader is None or self.inbox.is_full:
            return ()
        try:
            taken = reader.take(batch)
        except LogLost:
            return (reader.leave_log(),)
        if taken is not None:
            received, num_bytes = taken
            self.inbox.add(received, num_bytes)
            self._counts["received"] += len(received)
            self._counts["unreadable"] += reader.unreadable
            reader.unreadable = 0
        return (reader.took(),)

    def _decoded(self, body: bytes) -> ExperienceRecord | None:
        """None, and counted, when this client cannot read it: the daemon passes bodies on unread."""
        try:
            return decode(body, experience_decoder)
        except RecordError:
            self._counts["unreadable"] += 1
            return None
