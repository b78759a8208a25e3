"""What stands on the daemon's log: records that were taken, announcements, requests that were served.

    entry    length of the head u32, little-endian | head | bodies, one behind the other

A head is a msgpack message, and the bodies of a Stored are arrays of records as they came. A segment of the log opens
with a snapshot of what its predecessors said beside their records, so that they can go.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

from mrl.errors import RecordError
from mrl.exchange.entry import Entry
from mrl.records.codec import MAX_MESSAGE_BYTES, Buffer, decode, decoder, encode
from mrl.records.exchange_messages import Announce, Commit, Done
from mrl.records.experience import RecordKind
from mrl.records.tags import PackTags, Tags
from mrl.records.version import Count, Name

MAX_NAMES = 65_536
_LENGTH = struct.Struct("<I")


class StoredPack(msgspec.Struct, frozen=True, kw_only=True):
    """Records that have their tags in common, and where their bytes end."""

    tags: PackTags
    number: Count
    """Of the first record."""
    count: Count
    num_bytes: Count


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stored"):
    """Records that were taken together; by which Put, unless they were on the log before."""

    client: str = ""
    seq: Count = 0
    packs: list[StoredPack]
    id_hashes: bytes = b""
    """Of the records of that Put, as its packs gave them."""


class Indexed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="indexed"):
    """From here on records of these types are held one by one."""

    kinds: list[RecordKind]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """What a daemon knows that no held record says."""

    last_number: Count
    announcements: list[Announce]
    commits: list[Commit]
    record_ids: Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)]
    """Ids of what was stored last: they are not taken a second time."""
    puts: dict[str, dict[Count, Count]] = {}
    """Client -> numbers of the Puts that were stored last -> records of them."""
    windows: list[tuple[str, list[tuple[Count, bytes]]]] = []
    """(client, (bytes of records, hashes of their ids) of the Puts that were stored last)."""
    indexed: list[RecordKind] = []
    """Types whose records are asked for one by one."""


LogEntry = Stored | Indexed | Announce | Done | Commit

log_entry_decoder: msgspec.msgpack.Decoder[LogEntry] = decoder(LogEntry)
snapshot_decoder: msgspec.msgpack.Decoder[Snapshot] = decoder(Snapshot)


def written(head: LogEntry, bodies: Sequence[Buffer] = ()) -> list[Buffer]:
    """An entry, in parts that belong together."""
    encoded = encode(head)
    return [_LENGTH.pack(len(encoded)) + encoded, *bodies]


def read(payload: bytes) -> tuple[LogEntry, int]:
    """The head of an entry, and where its bodies begin. Raises RecordError when it is none."""
    if len(payload) < _LENGTH.size:
        raise RecordError(f"a log entry of {len(payload)} bytes")
    begin = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    head = decode(memoryview(payload)[_LENGTH.size : begin], log_entry_decoder, max_bytes=MAX_MESSAGE_BYTES)
    needed = sum(pack.num_bytes for pack in head.packs) if isinstance(head, Stored) else 0
    if begin + needed > len(payload):
        raise RecordError(f"a log entry of {len(payload)} bytes whose records need {begin + needed}")
    return head, begin


def bodies_of(stored: Stored, payload: Buffer, begin: int) -> Iterator[tuple[StoredPack, Buffer, int]]:
    """(pack, its records as an array, where they begin in the payload)."""
    view = memoryview(payload)
    for pack in stored.packs:
        body = view[begin : begin + pack.num_bytes]
        yield pack, bytes(body) if 2 * pack.num_bytes < len(payload) else body, begin
        begin += pack.num_bytes


def stored_of(entries: Iterable[Entry], *, client: str = "", seq: int = 0, id_hashes: bytes = b"") -> Stored:
    """What goes on the log before the arrays of the entries."""
    return Stored(
        client=client,
        seq=seq,
        id_hashes=id_hashes,
        packs=[
            StoredPack(tags=pack_tags(entry.tags), number=entry.number, count=entry.count, num_bytes=entry.array_bytes)
            for entry in entries
        ],
    )


def pack_tags(tags: Tags | PackTags) -> PackTags:
    """The part of the tags that packs have."""
    if isinstance(tags, PackTags):
        return tags
    return PackTags(type=tags.type, source=tags.source, oldest=tags.oldest, newest=tags.newest, task=tags.task)


def arrays_of(entries: Iterable[Entry]) -> list[Buffer]:
    """The arrays of the entries, in parts, one behind the other."""
    return [part for entry in entries for part in entry.array]
