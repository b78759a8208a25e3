"""Records of equal tags as they travel, there and on: an array of encoded records behind a head."""

from typing import Annotated

import msgspec

from mrl.records.experience import RecordKind
from mrl.records.version import Count, Name, Version

MAX_PACK_RECORDS = 4096
MAX_PUT_PACKS = 1024
NOTHING = msgspec.Raw(b"\xc0")
"""nil, where something else is meant to be somewhere else."""


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
