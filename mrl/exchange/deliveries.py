"""From entries to messages: cut into shipments of bounded size, and sent as fast as the client acknowledges them."""

from collections.abc import Iterable, Sequence

import msgspec

from mrl.exchange.entry import Entry
from mrl.exchange.sessions import Session, Shipment
from mrl.exchange.shelf import Shelf
from mrl.exchange.streams import NextBatch
from mrl.exchange.versions import VersionBook
from mrl.records.exchange_messages import Batch, DaemonMessage, Deliver
from mrl.records.packs import Parcel

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
        session.queue(_shipments(entries, seq=seq))
        return self.dispatch(client, session, now_s)

    def dispatch(self, client: bytes, session: Session, now_s: float) -> Outgoing:
        """What waits for the client, as far as it has acknowledged what it was sent."""
        out: Outgoing = []
        while shipment := session.next_shipment(now_s):
            out += self._send(client, shipment)
        return out

    def repeat(self, client: bytes, record_ids: Iterable[str]) -> Outgoing:
        """The same records again, outside all queues."""
        return [item for one in _shipments(self._held(record_ids)) for item in self._send(client, one)]

    def batch(self, batch: NextBatch) -> Batch:
        """The message for the next records of a stream."""
        return Batch(
            incarnation=self._incarnation,
            stream=batch.stream,
            previous=batch.previous,
            parcels=[self._parcel(entry, by_place=batch.reads_log) for entry in batch.entries],
        )

    def _parcel(self, entry: Entry, *, by_place: bool) -> Parcel:
        tags = entry.tags
        age_versions = self._versions.age(tags)
        if by_place and entry.place:
            return Parcel(
                source=tags.source,
                number=entry.number,
                count=entry.count,
                age_versions=age_versions,
                place=entry.place,
                num_bytes=entry.array_bytes,
            )
        body = entry.body if len(entry.array) == 1 else b"".join(entry.array)
        return Parcel(
            source=tags.source,
            number=entry.number,
            count=entry.count,
            age_versions=age_versions,
            records=msgspec.Raw(body),
        )

    def _send(self, client: bytes, shipment: Shipment) -> Outgoing:
        """Those of the shipment's records that are still held; an answer goes out even when none is."""
        entries = self._held(shipment.sizes)
        if not entries and not shipment.seq:
            return []
        message = Deliver(
            incarnation=self._incarnation,
            records=[msgspec.Raw(entry.body) for entry in entries],
            ages_versions=[self._versions.age(entry.tags) for entry in entries],
            seq=shipment.seq,
            part=shipment.part,
            parts=shipment.parts,
        )
        return [(client, message)]

    def _held(self, record_ids: Iterable[str]) -> list[Entry]:
        entries = map(self._shelf.get, record_ids)
        return [entry for entry in entries if entry is not None]


def _shipments(entries: Sequence[Entry], *, seq: int = 0) -> list[Shipment]:
    """The entries in shipments; with a `seq` there is at least one."""
    parts: list[dict[str, int]] = [{}]
    part_bytes = 0
    for entry in entries:
        if parts[-1] and part_bytes + len(entry.body) > MAX_DELIVER_BYTES:
            parts.append({})
            part_bytes = 0
        parts[-1][entry.record_id] = len(entry.body)
        part_bytes += len(entry.body)
    if not entries and not seq:
        return []
    return [Shipment(part, seq, number, len(parts)) for number, part in enumerate(parts, 1)]
