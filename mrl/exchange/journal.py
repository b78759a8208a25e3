"""What stands on the daemon's log: records that were taken, announcements, requests that were served.

A segment of the log opens with a snapshot of what its predecessors said beside their records, so that they can go.
"""

from typing import Annotated

import msgspec

from mrl.records.codec import decoder
from mrl.records.exchange import Announce, Commit, Done
from mrl.records.version import Count, Name


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stored"):
    """Records that were taken together, with their numbers."""

    records: list[msgspec.Raw]
    numbers: list[Count]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """What a daemon knows that no held record says."""

    last_number: Count
    announcements: list[Announce]
    commits: list[Commit]
    record_ids: Annotated[list[Name], msgspec.Meta(max_length=65_536)]
    """Ids of what was stored last: they are not taken a second time."""


LogEntry = Stored | Announce | Done | Commit

log_entry_decoder: msgspec.msgpack.Decoder[LogEntry] = decoder(LogEntry)
snapshot_decoder: msgspec.msgpack.Decoder[Snapshot] = decoder(Snapshot)
