"""What a worker has to keep to beside sampling: its lease, its peers, its learner's bounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mrl.records.rollouts import ScoredGroup
from mrl.rollout.peer_scoring import Scorer
from mrl.rollout.plain_serving import PlainServing
from mrl.rollout.sleep_requests import SleepRequests


@dataclass(frozen=True)
class Duties:
    """What a worker has to keep to beside sampling."""

    max_answers: Callable[[int], int]
    """Answers that may be in flight, told how many are: what its lease allows, or the batch of a synchronous run."""
    publish: Callable[[Sequence[ScoredGroup]], None]
    """Gives to the peers what the regime shares of finished groups; called before the learner gets them."""
    max_staleness_versions: int
    """Groups in flight that can only end staler than this are given up."""
    held_out_share: float | None = None
    """Part of the places that held-out prompts may have while there are groups to sample; None where none come."""
    losses: Callable[[], Mapping[str, float]] = dict
    """Metrics of what was published and goes to no peer."""
    scorer: Scorer | None = None
    """Answers what peers ask of the engine, between all else."""
    plain: PlainServing | None = None
    """Answers requests outside of episodes, in a bounded share."""
    rest: SleepRequests | None = None
    """Whether the worker is to sleep, where it may."""
    has_lost_lease: Callable[[], bool] = lambda: False
    """Whether the lease of what is in flight ran out while this process stood still: others may have its places."""
    rests_unleased: bool = False
    """Whether the engine samples only when it is collected from: what is in flight when the lease is lost then rests,
    and goes on under the next one. A server's answers run on by themselves, and are given up."""
    in_step: bool = False
    """Sample under the newest announced version or not at all, and batch by batch, as a synchronous run must."""
