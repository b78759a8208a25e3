"""Messages between the supervisor of another host and the first host's supervisor, about once a second.

Both messages state the whole situation, not changes: a lost message costs a second, a repeated one nothing.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import decoder
from mrl.records.telemetry_messages import TelemetryRecord
from mrl.records.version import Name

MAX_LINES = 100
MAX_LINE_CHARS = 2_000


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="host_report"):
    """Another host's supervisor -> the first host's: the state of its host."""

    host: Name
    session: Name
    """Random name of one life of that host's supervisor; two lives of one host must never start processes at the same
    time."""
    done: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """Learners of that host that finished."""
    ended: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """Stopped policies that have no process on that host any more."""
    is_over: bool = False
    """Whether that host has ended its processes and starts none any more."""
    end_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    """Exit code; not 0 where the run cannot go on, for `end_reason`."""
    end_reason: Annotated[str, msgspec.Meta(max_length=MAX_LINE_CHARS)] = ""
    lines: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_LINE_CHARS)]], msgspec.Meta(max_length=MAX_LINES)
    ] = []
    """Lines for a person about events on that host since the last report."""


class HostOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="host_order"):
    """First host's supervisor -> another host's: the state of the run, in answer to every report."""

    phase: Literal["wait", "running", "draining", "stopping"]
    """"wait": start nothing yet, since an earlier supervisor of this host may still have processes."""
    attempt: Name
    """Name of the folder of logs of this attempt."""
    hosts: Annotated[list[Name], msgspec.Meta(max_length=10_000)]
    """All hosts of the run, as `--hosts` names them."""
    done: Annotated[list[Name], msgspec.Meta(max_length=10_000)] = []
    """Learners of the whole run that finished; no host starts them again."""
    stopped: Annotated[list[Name], msgspec.Meta(max_length=10_000)] = []
    """Policies that a person stopped."""


InboxRecord = TelemetryRecord | HostReport
"""Messages that arrive at a supervisor."""

inbox_decoder: msgspec.msgpack.Decoder[InboxRecord] = decoder(InboxRecord)
host_order_decoder: msgspec.msgpack.Decoder[HostOrder] = decoder(HostOrder)
