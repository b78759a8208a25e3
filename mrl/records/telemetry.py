"""Metrics and heartbeats on their way from every role to the supervisor, the only writer of `metrics.jsonl`."""

from typing import Annotated

import msgspec

from mrl.records.codec import decoder
from mrl.records.version import Count, Name


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="metrics"):
    """Values measured by one role at one step of one policy; names and units stand in `mrl.metrics.names`."""

    role: Name
    policy: str
    """Empty for roles that serve no single policy."""
    step: Count
    """Learner step of the policy; for roles without one, the newest step they know."""
    time_unix_s: float
    values: Annotated[dict[str, float], msgspec.Meta(max_length=1000)]


class HeartbeatRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """A role is alive, and this is what it does or waits for."""

    role: Name
    policy: str
    pid: Count
    time_unix_s: float
    doing: Annotated[str, msgspec.Meta(max_length=200)]
    """For example "training" or "awaiting groups"."""
    awaiting: Annotated[str, msgspec.Meta(max_length=200)]
    """What is awaited, empty when nothing is."""
    whom: Annotated[str, msgspec.Meta(max_length=200)]
    for_s: float
    """How long it has been doing or awaiting this."""
    bound_s: float
    """When the wait gives up; 0 when nothing is awaited."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """One answer for people to read, with its prompt."""

    policy: Name
    step: Count
    kind: Name
    """"rollout", "rescue" or "evaluation"."""
    task: Name
    prompt: Annotated[str, msgspec.Meta(max_length=20_000)]
    completion: Annotated[str, msgspec.Meta(max_length=20_000)]
    reward: float
    source: str = ""
    """The peer that a rescue came from."""


TelemetryRecord = MetricsRecord | HeartbeatRecord | SampleRecord

telemetry_decoder: msgspec.msgpack.Decoder[TelemetryRecord] = decoder(TelemetryRecord)
