"""Own groups that are trained on again: a step's batch is part fresh groups, part earlier ones, drawn at random.

Experience replay as in arXiv 2604.08706, which draws uniformly from the newest rollouts, with two bounds: each group is
drawn `max_uses` times at most, at most once a step, and never when it is staler than the policy's own bound. The
staleness bound also limits the buffer: the oldest groups leave first, and no other size is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mrl.config.policy_tables import LearnerTable
from mrl.records.rollouts import ScoredGroup


class _Kept(NamedTuple):
    """A group that was trained on, and how often it was drawn since."""

    group: ScoredGroup
    uses: int


@dataclass
class ReuseBuffer:
    """Groups of one policy that may be trained on again. Not thread-safe."""

    groups_per_step: int
    """Groups that a step draws; fewer where there are not as many, as in a run's first step."""
    max_uses: int
    """Most draws of one group; its use as a fresh group does not count."""
    max_staleness_versions: int
    _kept: list[_Kept] = field(default_factory=list)
    """Groups in the order in which they were added."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Add groups that are trained on for the first time: they may be drawn from the next step on."""
        self._kept += [_Kept(group, 0) for group in groups]

    def draw(self, step: int, rng: np.random.Generator) -> list[ScoredGroup]:
        """Return the groups that learner step `step` trains on again, oldest addition first.

        All groups that may be drawn are equally likely. Groups that are too stale, or drawn for the last time, are
        forgotten. Where no group may be drawn, `rng` is untouched.
        """
        oldest = step - self.max_staleness_versions
        usable = [one for one in self._kept if one.group.oldest.step >= oldest and one.uses < self.max_uses]
        num_drawn = min(self.groups_per_step, len(usable))
        places = set(rng.choice(len(usable), num_drawn, replace=False).tolist())
        counted = [_Kept(one.group, one.uses + (place in places)) for place, one in enumerate(usable)]
        self._kept = [one for one in counted if one.uses < self.max_uses]
        return [one.group for place, one in enumerate(usable) if place in places]

    def state(self) -> list[Any]:
        """Return its part of a checkpoint, as plain JSON values."""
        return [[msgspec.to_builtins(group), uses] for group, uses in self._kept]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from `state()`."""
        self._kept = [_Kept(msgspec.convert(group, ScoredGroup), uses) for group, uses in state]


def reuse_of(table: LearnerTable, state: Mapping[str, Any]) -> ReuseBuffer | None:
    """Return the buffer of a policy, filled from a checkpoint's `state`; None where every group is trained on once."""
    if not table.reused_groups:
        return None
    buffer = ReuseBuffer(table.reused_groups, table.max_reuses, table.max_staleness_versions)
    buffer.restore(state.get("reuse", []))  # a checkpoint may be older than the key in the configuration
    return buffer
