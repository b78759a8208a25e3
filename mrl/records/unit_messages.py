"""The conversation between the allocator and the nodes whose units (GPUs, sets of cores) it leases.

Both sides repeat their whole state: a lost, doubled or late message costs time and nothing else. `life` is the number
of an allocator within its run; a message about an earlier allocator is ignored.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import decoder
from mrl.records.version import Count, Name

MAX_UNITS = 4096

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's account of one unit."""

    unit: Name
    epoch: Count
    """Largest epoch of the orders to start or to clear this unit."""
    resident_epoch: Count = 0
    """Epoch of the engine that runs, starts, or is not yet proved gone or asleep; 0 without such an engine."""
    resident_policy: Annotated[str, msgspec.Meta(max_length=200)] = ""
    cleared_epoch: Count = 0
    """Epoch up to which no engine runs or ever will: each is gone, or sleeps until an order of a later epoch."""
    failed_policy: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Policy whose engine failed on the unit again and again. While a report names a policy here, the unit is out of
    service for all policies."""
    unit_type: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Type of the unit as its host sees it. Units of one type are equally fast."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="node_report"):
    """Node -> allocator, several times a second and at every change."""

    host: Name
    life: Count
    """Number of the newest allocator that the node has heard; 0 before the first."""
    units: Annotated[list[UnitReport], msgspec.Meta(max_length=MAX_UNITS)]
    released: Annotated[list[Name], msgspec.Meta(max_length=MAX_UNITS)] = []
    """Policies that need no engine any more, because they are done or were stopped."""
    slept: Count = 0
    """Engines put to sleep since the node started."""
    woken: Count = 0
    failed_sleeps: Count = 0
    """Engines that could not fall asleep, or not in time, and were ended."""
    failed_wakes: Count = 0
    """Engines that did not wake up in time and were killed."""


class UnitOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order to a node about one unit."""

    unit: Name
    epoch: Count
    kind: Literal["start", "sleep", "end", "clear"]
    """start: start or wake an engine of `policy`. sleep, end: ask the engine to sleep or to end, within `grace_s`.
    clear: kill every process that is awake, and prove that none is left."""
    policy: Annotated[str, msgspec.Meta(max_length=200)] = ""
    grace_s: Seconds = 0.0


class NodeOrders(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="node_orders"):
    """Allocator -> node: answers a report. A unit without an order continues as it is."""

    life: Count
    orders: Annotated[list[UnitOrder], msgspec.Meta(max_length=MAX_UNITS)]


node_orders_decoder: msgspec.msgpack.Decoder[NodeOrders] = decoder(NodeOrders)
