"""Messages of the roles to the supervisor, the only writer of `metrics.jsonl`, of samples and of the timeline."""

from typing import Annotated

import msgspec

from mrl.records.episodes import MAX_SEGMENTS
from mrl.records.readable_turns import ReadableTurn
from mrl.records.version import Count, Name


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="metrics"):
    """Values measured by one role at one step of one policy; names and units stand in `mrl.metrics.names`."""

    role: Name
    policy: str
    """Policy that the role serves; empty for roles that serve no single policy."""
    step: Count
    """Learner step of the policy; for a role without steps, the newest step that the role knows."""
    time_unix_s: float
    values: Annotated[dict[str, float], msgspec.Meta(max_length=1000)]


class HeartbeatRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """Sign of life of a role, with its activity or its wait."""

    role: Name
    policy: str
    pid: Count
    time_unix_s: float
    doing: Annotated[str, msgspec.Meta(max_length=200)]
    """Activity, for example "training" or "awaiting groups"."""
    awaiting: Annotated[str, msgspec.Meta(max_length=200)]
    """Name of the wait, for example "groups"; empty when nothing is awaited."""
    whom: Annotated[str, msgspec.Meta(max_length=200)]
    for_s: float
    """Seconds since the wait, or else the activity, began."""
    bound_s: float
    """Seconds after which the wait gives up; 0 when nothing is awaited or the wait has no bound."""
    monotonic_s: float = 0.0
    """Time of the heartbeat on its host's monotonic clock, which all processes of one host share."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """One answer for people to read, with its prompt."""

    policy: Name
    step: Count
    kind: Name
    """"rollout", "rescue", "evaluation", or "unjudged": the first answer of a kind of verifier failure."""
    task: Name
    prompt: Annotated[str, msgspec.Meta(max_length=20_000)]
    completion: Annotated[str, msgspec.Meta(max_length=20_000)]
    reward: float
    source: str = ""
    """The peer that a rescue came from."""
    rewards: dict[str, float] = {}
    """Parts of the reward by name, where the verifier gave several."""
    failure: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Reason for which the verifier gave no reward."""
    opening: Annotated[str, msgspec.Meta(max_length=20_000)] = ""
    """First messages of an episode as the policy was shown them, special tokens included; empty for a plain answer."""
    turns: Annotated[list[ReadableTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Turns of an episode after its opening; empty for a plain answer."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An activity or a wait of a role, with its time; a long one comes in several spans."""

    kind: Annotated[str, msgspec.Meta(max_length=200)]
    """Kind of the activity or wait, for example "training" or "awaiting groups"."""
    whom: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Role or policy that a wait was for, or the subject of the activity."""
    is_wait: bool = False
    is_beside: bool = False
    """Whether another thread of the role did it, at the same time as the role's own activity."""
    began_unix_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    duration_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class SpansRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="spans"):
    """The spans of one role since its last record of this kind. Spans with `is_beside` false do not overlap."""

    role: Name
    policy: str
    spans: Annotated[list[Span], msgspec.Meta(max_length=500)]


TelemetryRecord = MetricsRecord | HeartbeatRecord | SampleRecord | SpansRecord
