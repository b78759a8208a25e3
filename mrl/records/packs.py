"""Records of equal tags as they travel, there and on: an array of encoded records behind a head."""

import struct
from collections.abc import Iterable
from itertools import compress
from typing import Annotated

import msgspec

from mrl.errors import RecordError
from mrl.records.codec import decode
from mrl.records.experience import RecordKind, raw_pack_decoder
from mrl.records.version import Count, Name, Version

MAX_PACK_RECORDS = 4096
MAX_PUT_PACKS = 1024
ID_HASH_BYTES = 8
NOTHING = msgspec.Raw(b"\xc0")
"""nil, where something else is meant to be somewhere else."""
ARRAY_HEAD = struct.Struct(">BI")
ARRAY_32 = 0xDD
"""msgpack's longest form of an array's head, whose length does not depend on the number of elements."""


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one source that have these tags in common. The daemon need not read them; their readers check."""

    type: RecordKind
    oldest: Version
    newest: Version
    task: Name
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_PACK_RECORDS)]
    num_bytes: Count
    """Length of `records`."""
    records: msgspec.Raw = NOTHING
    """An array of `count` encoded records; nil when they lie in the client's spool."""
    id_hashes: Annotated[bytes, msgspec.Meta(max_length=ID_HASH_BYTES * MAX_PACK_RECORDS)] = b""
    """xxh3-64 of every record's id, one behind the other; none from a client that does not know of them."""

    @property
    def is_consistent(self) -> bool:
        """Whether lengths are what they are said to be. A record is longer than the hash of its id."""
        has_hashes = len(self.id_hashes) == ID_HASH_BYTES * self.count and len(self.id_hashes) < self.num_bytes
        return len(memoryview(self.records)) == self.num_bytes and (has_hashes or not self.id_hashes)

    def only(self, is_wanted: Iterable[bool]) -> "Pack | None":
        """The records that are wanted, as a pack; None when there are none. Raises RecordError for no array of them."""
        wanted, raws = list(is_wanted), decode(memoryview(self.records), raw_pack_decoder, max_bytes=self.num_bytes)
        if len(raws) != self.count or len(wanted) != self.count:
            raise RecordError(f"a pack of {len(raws)} records, said to be {self.count}")
        if not any(wanted):
            return None
        array = ARRAY_HEAD.pack(ARRAY_32, sum(wanted)) + b"".join(compress(raws, wanted))
        hashes = (self.id_hashes[at : at + ID_HASH_BYTES] for at in range(0, len(self.id_hashes), ID_HASH_BYTES))
        return msgspec.structs.replace(
            self,
            count=sum(wanted),
            num_bytes=len(array),
            records=msgspec.Raw(array),
            id_hashes=b"".join(compress(hashes, wanted)),
        )


class Spooled(msgspec.Struct, frozen=True, kw_only=True):
    """Where the records of all packs of a Put lie, one behind the other, in the spool file of the client."""

    position: Count
    num_bytes: Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """xxh3-64 of these bytes."""


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive records of one source and age."""

    source: Name
    number: Count
    """Of the first record; the others follow."""
    count: Count
    age_versions: int
    records: msgspec.Raw = NOTHING
    """An array of `count` encoded records; nil when the reader finds them on the log."""
    place: Count = 0
    """Absolute offset on the log at which this array begins."""
    num_bytes: Count = 0
    """Its length there."""

    @property
    def last_number(self) -> int:
        """Of the last record."""
        return self.number + self.count - 1
