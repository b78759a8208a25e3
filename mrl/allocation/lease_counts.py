"""How often leases of units began and ended, and why, counted from the transitions of their table."""

from collections import Counter
from collections.abc import Iterable

from mrl.allocation.units import HELD, Transition, UnitState


class LeaseCounts:
    """Totals per policy since the allocator started."""

    def __init__(self) -> None:
        self.begun = Counter[str]()
        """Policy -> leases granted."""
        self.ended = Counter[tuple[str, str]]()
        """(policy, why) -> leases that ended."""
        self._held: dict[str, str] = {}
        """Unit -> policy that may go on there."""

    def take(self, transitions: Iterable[Transition]) -> None:
        """Count what happened. A lease ends once: when it is taken back, or when its engine is gone before."""
        for one in transitions:
            if one.state in HELD:
                self.begun[one.policy] += one.state is UnitState.GRANTED
                self._held[one.unit] = one.policy
            elif self._held.pop(one.unit, None) is not None:
                self.ended[one.policy, one.why] += 1
