"""How many groups may be running and ready at an adaptive pace: as many as the learner needs, and no more."""

from dataclasses import dataclass

STARVED_SHARE = 0.02
"""Share of the time that the learner waited while workers might not sample more, above which the window grows."""
CONTENT_SHARE = 0.005
"""Share of the time that the learner waited at all, up to which the window may shrink."""
RICH_BATCHES = 1.25
"""Ready groups, in batches, above which the learner has plenty as it takes a batch."""
RICH_PULLS = 3
"""Batches in a row that were taken out of plenty before the window shrinks."""
GROW_BATCHES = 0.5
SHRINK_BATCHES = 0.2
FLOOR_BATCHES = 1.25
"""Narrowest window, in batches."""
LONE_FLOOR_BATCHES = 1.5
"""Narrowest window with a single worker, in batches."""


@dataclass
class AdmissionWindow:
    """Window of one policy, in groups; it begins as wide as the staleness bound allows."""

    batch_groups: int
    max_staleness_versions: int

    def __post_init__(self) -> None:
        self.groups = self._most
        self._rich_pulls = 0

    @property
    def _most(self) -> float:
        return (self.max_staleness_versions + 1.0) * self.batch_groups

    def pull(self, stock_groups: int) -> None:
        """Note that the learner takes a batch out of `stock_groups` ready groups."""
        rich = stock_groups > RICH_BATCHES * self.batch_groups
        self._rich_pulls = self._rich_pulls + 1 if rich else 0

    def adjust(self, data_wait_shut_s: float, data_wait_s: float, period_s: float, *, num_replicas: int) -> None:
        """Once a period: widen the window where the learner waited for groups that workers might not sample
        (`data_wait_shut_s`), narrow it where the learner had plenty.
        """
        if data_wait_shut_s > STARVED_SHARE * period_s:
            self._rich_pulls = 0
            self.groups = min(self._most, self.groups + GROW_BATCHES * self.batch_groups)
        elif self._rich_pulls >= RICH_PULLS and data_wait_s <= CONTENT_SHARE * period_s:
            self._rich_pulls = 0
            floor = (LONE_FLOOR_BATCHES if num_replicas == 1 else FLOOR_BATCHES) * self.batch_groups
            self.groups = max(min(floor, self._most), self.groups - SHRINK_BATCHES * self.batch_groups)
