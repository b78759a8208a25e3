"""From entries to messages: cut into parcels of bounded size, and sent as fast as the client acknowledges them."""

from collections.abc import Iterable, Sequence

import msgspec

from mrl.exchange.entry import Entry
from mrl.exchange.sessions import Parcel, Session
from mrl.exchange.shelf import Shelf
from mrl.exchange.streams import NextBatch
from mrl.exchange.versions import VersionBook
from mrl.records.exchange import Batch, DaemonMessage, Deliver

MAX_DELIVER_BYTES = 256 * 1024

Outgoing = list[tuple[bytes, DaemonMessage]]
"""What to send to whom."""


class Deliveries:
    """Makes Deliver messages of what the shelf holds."""

    def __init__(self, shelf: Shelf, versions: VersionBook, incarnation: str) -> None:
        self._shelf, self._versions, self._incarnation = shelf, versions, incarnation

    def give(
        self, client: bytes, session: Session, entries: Sequence[Entry], now_s: float, *, seq: int = 0
    ) -> Outgoing:
        """Queue entries for a client, as the answer to its Fetch `seq` if that is not 0, and send what may be sent."""
        session.queue(_parcels(entries, seq=seq))
        return self.dispatch(client, session, now_s)

    def dispatch(self, client: bytes, session: Session, now_s: float) -> Outgoing:
        """What waits for the client, as far as it has acknowledged what it was sent."""
        out: Outgoing = []
        while parcel := session.next_parcel(now_s):
            out += self._send(client, parcel)
        return out

    def repeat(self, client: bytes, record_ids: Iterable[str]) -> Outgoing:
        """The same records again, outside all queues."""
        return [item for parcel in _parcels(self._held(record_ids)) for item in self._send(client, parcel)]

    def batch(self, batch: NextBatch) -> Batch:
        """The message for the next records of a stream."""
        return Batch(
            incarnation=self._incarnation,
            stream=batch.stream,
            previous=batch.previous,
            numbers=[entry.number for entry in batch.entries],
            records=[msgspec.Raw(entry.body) for entry in batch.entries],
            ages_versions=[self._versions.age(entry.tags) for entry in batch.entries],
        )

    def _send(self, client: bytes, parcel: Parcel) -> Outgoing:
        """Those of the parcel's records that are still held; an answer goes out even when none is."""
        entries = self._held(parcel.sizes)
        if not entries and not parcel.seq:
            return []
        message = Deliver(
            incarnation=self._incarnation,
            records=[msgspec.Raw(entry.body) for entry in entries],
            ages_versions=[self._versions.age(entry.tags) for entry in entries],
            seq=parcel.seq,
            part=parcel.part,
            parts=parcel.parts,
        )
        return [(client, message)]

    def _held(self, record_ids: Iterable[str]) -> list[Entry]:
        entries = map(self._shelf.get, record_ids)
        return [entry for entry in entries if entry is not None]


def _parcels(entries: Sequence[Entry], *, seq: int = 0) -> list[Parcel]:
    """The entries in parcels; with a `seq` there is at least one."""
    parts: list[dict[str, int]] = [{}]
    part_bytes = 0
    for entry in entries:
        if parts[-1] and part_bytes + len(entry.body) > MAX_DELIVER_BYTES:
            parts.append({})
            part_bytes = 0
        parts[-1][entry.tags.record_id] = len(entry.body)
        part_bytes += len(entry.body)
    if not entries and not seq:
        return []
    return [Parcel(part, seq, number, len(parts)) for number, part in enumerate(parts, 1)]
