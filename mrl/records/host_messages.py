"""What the supervisor of another host and the first host's supervisor tell each other, about once a second.

Both messages say how things are, not what changed: one that is lost costs a second, one that comes twice nothing.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import decoder
from mrl.records.telemetry_messages import TelemetryRecord
from mrl.records.version import Name

MAX_LINES = 100
MAX_LINE_CHARS = 2_000


class HostReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="host_report"):
    """Other host -> first host."""

    host: Name
    session: Name
    """One life of that host's supervisor; two of one host must never start processes at the same time."""
    done: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """Its learners that finished."""
    ended: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []
    """Stopped policies that have no process there any more."""
    is_over: bool = False
    """It has ended its processes and starts none any more."""
    end_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    """Not 0: the run cannot go on, for `end_reason`."""
    end_reason: Annotated[str, msgspec.Meta(max_length=MAX_LINE_CHARS)] = ""
    lines: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_LINE_CHARS)]], msgspec.Meta(max_length=MAX_LINES)
    ] = []
    """What a person should see of what happened there since the last report."""


class HostOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="host_order"):
    """First host -> other host, in answer to every report."""

    phase: Literal["wait", "running", "draining", "stopping"]
    """"wait": start nothing yet, an earlier supervisor of this host may still have processes."""
    attempt: Name
    """Name of the folder of logs."""
    hosts: Annotated[list[Name], msgspec.Meta(max_length=10_000)]
    """All hosts of the run, as `--hosts` names them."""
    done: Annotated[list[Name], msgspec.Meta(max_length=10_000)] = []
    """Learners of the whole run that finished; they are not started again."""
    stopped: Annotated[list[Name], msgspec.Meta(max_length=10_000)] = []
    """Policies that a person stopped."""


InboxRecord = TelemetryRecord | HostReport
"""What arrives at a supervisor."""

inbox_decoder: msgspec.msgpack.Decoder[InboxRecord] = decoder(InboxRecord)
host_order_decoder: msgspec.msgpack.Decoder[HostOrder] = decoder(HostOrder)
