"""Limits and side tasks of a worker: its lease, the bounds of its learner, work for peers and for the gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mrl.records.rollouts import ScoredGroup
from mrl.rollout.direct_serving import DirectServing
from mrl.rollout.peer_scoring import Scorer


class SleepRequests(Protocol):
    """Requests that one engine sleep and wake, and the worker's answers."""

    def is_due(self) -> bool:
        """Whether the worker is to sleep."""

    def refuse(self) -> None:
        """Answer that the engine cannot sleep; the worker is then told to end."""

    def sleep(self) -> bool:
        """Answer that the engine sleeps, and wait until it is to wake up; False when the worker is to end."""

    def awake(self) -> None:
        """Answer that the engine can sample again."""


@dataclass(frozen=True)
class LoopOptions:
    """Limits and side tasks of one worker."""

    max_answers: Callable[[int], int]
    """Answers in flight -> answers that may be: as many as the lease allows, or the batch of a synchronous run."""
    publish: Callable[[Sequence[ScoredGroup]], None]
    """Publishes the regime's records of finished groups to the peers; called before the learner gets the groups."""
    max_staleness_versions: int
    """Groups in flight that can only end with more staleness than this, in versions, are given up."""
    held_out_share: float | None = None
    """Share of the places that held-out prompts may have while there are groups to sample; None without evaluations."""
    losses: Callable[[], Mapping[str, float]] = dict
    """Metrics of published records that go to no peer."""
    scorer: Scorer | None = None
    """Scores answers for peers with the engine, between other work; None where no peer asks."""
    plain: DirectServing | None = None
    """Answers requests outside of episodes, in a bounded share of the places; None where the run does not."""
    rest: SleepRequests | None = None
    """Requests that the engine sleep; None where it never does."""
    has_lost_lease: Callable[[], bool] = lambda: False
    """Whether the lease of answers in flight ran out while this process stood still: others may have their slots."""
    rests_unleased: bool = False
    """Whether the engine samples only within `collect`. Answers in flight when the lease is lost then rest, and go on
    under the next lease. Answers of a server, which samples by itself, are given up."""
    in_step: bool = False
    """Whether to sample only under the newest announced version, and batch by batch, as a synchronous run must."""
