"""The client's end of a stream: takes batches in their order, each record once, and knows how far it has come."""

from collections.abc import Sequence
from itertools import count, repeat

import msgspec

from mrl.errors import RecordError
from mrl.exchange.shared_files import SharedFiles
from mrl.records.codec import Buffer, decode
from mrl.records.exchange_messages import Batch, Stream, Took
from mrl.records.experience import ExperienceRecord, Received, experience_decoder, pack_decoder, raw_pack_decoder
from mrl.records.packs import Parcel

MAX_LOST = 10
"""A log that is lost so often, and not found in between, is not there."""


class LogLost(Exception):
    """The daemon's log cannot be read from here (any more), or holds something else."""


class Reader:
    """One open stream. `came_to` is the number to go on after, for the daemon and for a checkpoint."""

    def __init__(self, wish: Stream, files: SharedFiles) -> None:
        self._wish, self._files = wish, files
        self._leaves_log = False
        self._num_lost = 0
        self.came_to = wish.after
        self.unreadable = 0
        """Records that came and could not be read."""

    @property
    def wish(self) -> Stream:
        """The message that opens or renews the stream where it stands now."""
        reads_log = self._files.has_log and not self._leaves_log
        return msgspec.structs.replace(self._wish, after=self.came_to, reads_log=reads_log)

    def take(self, batch: Batch) -> tuple[list[Received], int] | None:
        """The records of a batch that have not come yet, and their bytes; None when something before them is missing.

        They count as come: the caller keeps them. Raises LogLost, and then nothing has come.
        """
        if batch.previous > self.came_to:
            return None
        new = [(parcel, self._bytes_of(parcel)) for parcel in batch.parcels if parcel.last_number > self.came_to]
        read = [(parcel, self._records_of(parcel, data)) for parcel, data in new]
        # Nothing can be lost any more: from here on records count as come.
        found = [one for parcel, records in read for one in self._new_ones(parcel, records)]
        num_bytes = sum(len(data) for _, data in new)
        self.came_to = max([self.came_to, *(parcel.last_number for parcel in batch.parcels)])
        self._leaves_log &= not new or self._num_lost >= MAX_LOST
        if any(parcel.place for parcel, _ in new):
            self._num_lost = 0
        return found, num_bytes

    def took(self) -> Took:
        """Says how far the stream has come."""
        return Took(client=self._wish.client, stream=self._wish.stream, upto=self.came_to)

    def leave_log(self) -> Stream:
        """Have the records sent instead of their places: once, as they may have moved; after many times for good."""
        self._leaves_log, self._num_lost = True, self._num_lost + 1
        return self.wish

    def _new_ones(self, parcel: Parcel, records: Sequence[ExperienceRecord | None]) -> list[Received]:
        """Those that have not come in an earlier batch."""
        received = map(Received, records, repeat(parcel.age_versions), count(parcel.number))  # type: ignore[arg-type]
        if parcel.number > self.came_to and None not in records:
            return [*received]
        return [one for one in received if one.record is not None and one.number > self.came_to]

    def _bytes_of(self, parcel: Parcel) -> Buffer:
        if not parcel.place:
            return memoryview(parcel.records)
        data = self._files.read_log(parcel.place, parcel.num_bytes)
        if data is None:
            raise LogLost
        return data

    def _records_of(self, parcel: Parcel, data: Buffer) -> Sequence[ExperienceRecord | None]:
        """The records by their places; None for those that cannot be read, or say that they are another source's."""
        records = _decoded(data)
        if parcel.place and len(records) != parcel.count:
            raise LogLost
        if len(records) == parcel.count and _sources_of(records).count(parcel.source) == parcel.count:
            return records
        records = [one if one is not None and one.source == parcel.source else None for one in records[: parcel.count]]
        self.unreadable += parcel.count - len(records) + records.count(None)
        return records


def _decoded(data: Buffer) -> Sequence[ExperienceRecord | None]:
    try:
        return decode(data, pack_decoder, max_bytes=len(data))
    except RecordError:
        return _one_by_one(data)


def _sources_of(records: Sequence[ExperienceRecord | None]) -> list[str]:
    """One for every record that can be read."""
    return [one.source for one in records if one is not None]


def _one_by_one(data: Buffer) -> list[ExperienceRecord | None]:
    """What can be read of an array of which something cannot."""
    try:
        raws = decode(data, raw_pack_decoder, max_bytes=len(data))
    except RecordError:
        return []
    found: list[ExperienceRecord | None] = []
    for raw in raws:
        try:
            found.append(decode(memoryview(raw), experience_decoder))
        except RecordError:
            found.append(None)
    return found
