"""The conversation with the allocator (MWRA in the paper): how many requests each worker may run at once."""

from typing import Annotated

import msgspec

from mrl.records.codec import decoder
from mrl.records.unit_messages import NodeOrders, NodeReport
from mrl.records.version import Count, Name

Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="lease_request"):
    """Worker -> allocator, about once a second: the worker is alive, reports its throughput, and renews its lease."""

    holder: Name
    """Worker name, unique in the run."""
    policy: Name
    generated_tokens: Count
    """Tokens of complete groups since the worker started."""
    slot_seconds: Rate
    """Integral over time of the groups' running requests since the worker started, in requests times seconds."""
    epoch: Count
    """Epoch of the lease that the worker acts under; 0 before the first."""
    slots: Count = 0
    """Requests that the worker may run under that lease.

    After a smaller grant: the requests that still run, until they fit into it. A restarted allocator learns from this
    field which slots are in use.
    """
    newest_epoch: Count = 0
    """Epoch of the newest lease granted; above `epoch` while more requests run than the newest lease allows."""
    sequence: Count = 0
    """Number of this request; the grant that answers the request carries this number back."""
    unit: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Unit that the worker was started on; empty where slots are leased and not units."""
    unit_epoch: Count = 0
    """Epoch under which the worker was started on the unit."""
    active_s: Rate = 0.0
    """Seconds with an answer in flight since the worker started."""
    sampled_tokens: Count = 0
    """Tokens sampled for groups since the worker started, tokens of unfinished answers included."""
    full_answers: Count = 0
    """Answers in flight when the engine held no more; 0 while the engine has room for all that the lease allows."""
    awaits_turn: bool = False
    """Whether the engine has not begun to start on the unit, which several policies use in turns."""


class LeaseReturn(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="lease_return"):
    """Worker -> allocator: the worker runs nothing and never will again; its lease is free."""

    holder: Name
    policy: Name


class LearnerReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="learner_report"):
    """Learner -> allocator, after every step and about once a second in waits: totals since the learner started."""

    policy: Name
    trained_tokens: Count
    busy_s: Rate
    data_wait_s: Rate
    trained_groups: Count = 0
    dropped_groups: Count = 0
    """Groups that were too stale to be trained on."""


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="lease_grant"):
    """Allocator -> worker: run at most `slots` requests at once for `ttl_s` seconds."""

    holder: Name
    policy: Name
    slots: Count
    epoch: Count
    ttl_s: Rate
    """Seconds from the sending of the request that this grant answers."""
    sequence: Count = 0
    """Number of the request that this grant answers."""


class ReportAck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="report_ack"):
    """Allocator -> learner: confirms a report."""

    policy: Name


AllocatorRequest = LeaseRequest | LeaseReturn | LearnerReport
AllocatorReply = LeaseGrant | ReportAck
UnitRequest = AllocatorRequest | NodeReport
"""Messages to an allocator of whole units."""
UnitReply = AllocatorReply | NodeOrders

allocator_request_decoder: msgspec.msgpack.Decoder[AllocatorRequest] = decoder(AllocatorRequest)
allocator_reply_decoder: msgspec.msgpack.Decoder[AllocatorReply] = decoder(AllocatorReply)
unit_request_decoder: msgspec.msgpack.Decoder[UnitRequest] = decoder(UnitRequest)
