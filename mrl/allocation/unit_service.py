"""Which policies no unit serves any more: all that their engines fit are dead, or their engines fail there."""

from collections.abc import Mapping

from mrl.allocation.units import UnitRow, UnitState


class UnitService:
    """When every policy was last served, or could have been.

    A policy's engine is in doubt on a unit where it failed again and again, until it speaks there.
    """

    def __init__(self, fits: Mapping[str, frozenset[str]], now_s: float) -> None:
        """`fits`: policy -> units that its engine fits."""
        self._fits = dict(fits)
        self._served_s = dict.fromkeys(fits, now_s)
        self._doubts: set[tuple[str, str]] = set()

    def failed(self, unit: str, policy: str) -> None:
        """The policy's engine was given up on a unit."""
        self._doubts.add((unit, policy))

    def spoke(self, unit: str, policy: str, now_s: float) -> None:
        """The policy's engine runs on a unit."""
        self._doubts.discard((unit, policy))
        self._served_s[policy] = now_s

    def is_doubtful(self, unit: str, policy: str) -> bool:
        """Whether the policy's engine failed there and was not heard since."""
        return (unit, policy) in self._doubts

    def release(self, policy: str) -> None:
        """The policy needs no engine any more."""
        self._fits.pop(policy, None)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s`: nobody listened."""
        self._served_s = {policy: served_s + gap_s for policy, served_s in self._served_s.items()}

    def look(self, rows: Mapping[str, UnitRow], now_s: float) -> None:
        """Whom some unit may still serve. To be called every tick."""
        for policy, units in self._fits.items():
            if any(rows[unit].state is not UnitState.DEAD and (unit, policy) not in self._doubts for unit in units):
                self._served_s[policy] = now_s

    def unserved(self, now_s: float, *, for_s: float) -> list[str]:
        """Policies that no unit has served for longer than `for_s`."""
        return [policy for policy in self._fits if now_s - self._served_s[policy] > for_s]
