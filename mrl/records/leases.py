"""The conversation with the allocator (MWRA in the paper): who may run how many requests at once."""

from typing import Annotated

import msgspec

from mrl.records.codec import decoder
from mrl.records.unit_messages import NodeOrders, NodeReport
from mrl.records.version import Count, Name

Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="lease_request"):
    """Worker -> allocator, about once a second: I am here, this is my throughput, renew my lease."""

    holder: Name
    """Worker name, unique in the run."""
    policy: Name
    generated_tokens: Count
    """Total since the worker started."""
    slot_seconds: Rate
    """Integral of running requests over time since the worker started."""
    epoch: Count
    """Epoch of the lease that the worker acts under; 0 before the first."""
    slots: Count = 0
    """Requests that it may have running under that lease, or still has: those that a smaller lease has no room for.

    A restarted allocator learns from it.
    """
    newest_epoch: Count = 0
    """Epoch of the newest lease that it was granted: the smaller one, while it still acts under an older."""
    sequence: Count = 0
    """Number of this request; the grant that answers it carries it back."""
    unit: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The unit that the worker was started on; empty where slots are leased and not units."""
    unit_epoch: Count = 0
    """The epoch under which it was started there."""
    active_s: Rate = 0.0
    """Time with an answer in flight since the worker started."""
    sampled_tokens: Count = 0
    """Total since the worker started, those of answers that have not ended included."""
    full_answers: Count = 0
    """Answers in flight when the engine held no more; 0 while all that the lease allows fits."""
    awaits_turn: bool = False
    """Its engine has not begun to start on the unit, which others have in turns."""


class LeaseReturn(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="lease_return"):
    """Worker -> allocator: I run nothing any more and never will again; what I held is free."""

    holder: Name
    policy: Name


class LearnerReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="learner_report"):
    """Learner -> allocator, after every step and about once a second while it waits: totals since it started."""

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
    """Counted from when the request that this grant answers was sent."""
    sequence: Count = 0
    """Number of the request that this grant answers."""


class ReportAck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="report_ack"):
    """Allocator -> learner: received."""

    policy: Name


AllocatorRequest = LeaseRequest | LeaseReturn | LearnerReport
AllocatorReply = LeaseGrant | ReportAck
UnitRequest = AllocatorRequest | NodeReport
"""What an allocator of whole units hears."""
UnitReply = AllocatorReply | NodeOrders

allocator_request_decoder: msgspec.msgpack.Decoder[AllocatorRequest] = decoder(AllocatorRequest)
allocator_reply_decoder: msgspec.msgpack.Decoder[AllocatorReply] = decoder(AllocatorReply)
unit_request_decoder: msgspec.msgpack.Decoder[UnitRequest] = decoder(UnitRequest)
