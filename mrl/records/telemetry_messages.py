"""What roles tell the supervisor, the only writer of `metrics.jsonl`, of samples and of the timeline."""

from typing import Annotated

import msgspec

from mrl.records.episodes import MAX_SEGMENTS
from mrl.records.told_turns import ToldTurn
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
    monotonic_s: float = 0.0
    """When it was made, by the clock of its host that nobody sets; all processes of one host have it in common."""


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """One answer for people to read, with its prompt."""

    policy: Name
    step: Count
    kind: Name
    """"rollout", "rescue", "evaluation", or "unjudged": the first answer of a kind on which a verifier failed."""
    task: Name
    prompt: Annotated[str, msgspec.Meta(max_length=20_000)]
    completion: Annotated[str, msgspec.Meta(max_length=20_000)]
    reward: float
    source: str = ""
    """The peer that a rescue came from."""
    rewards: dict[str, float] = {}
    """Parts of the reward by name, where the verifier gave several."""
    failure: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Why the verifier gave no reward."""
    opening: Annotated[str, msgspec.Meta(max_length=20_000)] = ""
    """Of an episode: its first messages as the policy was shown them, special tokens included."""
    turns: Annotated[list[ToldTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Of an episode: who said what behind them."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What a role did, or waited for, for a while; a long one comes in pieces."""

    kind: Annotated[str, msgspec.Meta(max_length=200)]
    """For example "training" or "awaiting groups"."""
    whom: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """Whom a wait was for, or what the activity was about."""
    is_wait: bool = False
    is_beside: bool = False
    """Whether another thread did it, at the same time as what the role did itself."""
    began_unix_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    duration_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class SpansRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="spans"):
    """What one role did since it last said so. Spans that are not beside do not overlap."""

    role: Name
    policy: str
    spans: Annotated[list[Span], msgspec.Meta(max_length=500)]


TelemetryRecord = MetricsRecord | HeartbeatRecord | SampleRecord | SpansRecord
