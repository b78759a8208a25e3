"""What comes from the daemon, decoded and sorted out: new or not, readable or not, in its place in a stream."""

from collections import Counter

from mrl.errors import RecordError
from mrl.exchange.inbox import Inbox
from mrl.exchange.reader import Reader
from mrl.records.codec import decode
from mrl.records.exchange import Batch, ClientMessage, Commit, Deliver, Stream, Took
from mrl.records.experience import ExperienceRecord, Received, experience_decoder
from mrl.records.tags import tags_of


class Arrivals:
    """Inbox and streams of one client. Adds to `counts`: received, unreadable."""

    def __init__(self, counts: Counter[str]) -> None:
        self.inbox = Inbox()
        self._readers: dict[str, Reader] = {}
        self._commits: dict[str, Commit] = {}
        self._counts = counts

    def open(self, wish: Stream) -> None:
        """Batches of this stream are expected from now on."""
        self._readers[wish.stream] = Reader(wish)

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

    def read(self, batch: Batch) -> Took | None:
        """Take a batch whole or not at all: what is not taken comes again. Returns how far the stream has come."""
        reader = self._readers.get(batch.stream)
        if reader is None or self.inbox.is_full:
            return None
        for number, raw, age_versions in reader.new_of(batch) or ():
            body = bytes(raw)
            record = self._decoded(body)
            if record is not None:
                self._counts["received"] += 1
                self.inbox.add(Received(record, age_versions, number), len(body))
        return Took(client=reader.wish.client, stream=batch.stream, upto=reader.came_to)

    def _decoded(self, body: bytes) -> ExperienceRecord | None:
        """None, and counted, when this client cannot read it: the daemon passes bodies on unread."""
        try:
            return decode(body, experience_decoder)
        except RecordError:
            self._counts["unreadable"] += 1
            return None
