"""One record that the exchange holds."""

from dataclasses import dataclass

from mrl.exchange.kinds import OVERHEAD_BYTES
from mrl.records.tags import Tags


@dataclass(slots=True, eq=False)
class Entry:
    """One held record, as its source encoded it."""

    tags: Tags
    body: bytes
    number: int
    """Numbers the records in the order in which they came, once and for all."""
    offset: int
    """Where it stands on the log."""

    @property
    def held_bytes(self) -> int:
        """What the entry counts against the budget."""
        return len(self.body) + OVERHEAD_BYTES

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts newest first."""
        oldest = self.tags.oldest
        return -oldest.run_epoch, -oldest.step, -self.number
