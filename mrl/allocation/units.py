"""The lease table of whole units: a GPU, a set of them, or a set of CPU cores; each runs one engine of one policy.

FREE -> GRANTED -> ACTIVE -> DRAINING -> CLEARING -> FREE, and DEAD for what could not be proved empty in time. Every
transition is a compare-and-set on (epoch, states it may come from): a word about an older lease changes nothing. Epochs
of a unit only grow. CLEARING ends by proof from the unit's node and by nothing else, so a unit never has two owners.

A table begins with every unit in CLEARING: what an earlier allocator granted may still run there. No epoch is used by
two allocators: after both an allocator and a node have started again, a late word could otherwise mean either lease.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

EPOCHS_PER_LIFE = 2**32


class UnitState(StrEnum):
    """What a unit's lease is in."""

    FREE = "free"
    """Proved quiet, nobody's: empty, or with engines that sleep."""
    GRANTED = "granted"
    """Its node is told to start an engine, which has not spoken yet."""
    ACTIVE = "active"
    """The engine renews its lease."""
    DRAINING = "draining"
    """The engine is asked to end, or to sleep, until the deadline."""
    CLEARING = "clearing"
    """Its node is to kill what is left and awake, and to prove that nothing is."""
    DEAD = "dead"
    """No proof came by the deadline, or engines fail there again and again; a later proof still frees it."""


HELD = frozenset({UnitState.GRANTED, UnitState.ACTIVE})
"""A policy owns the unit and may go on."""


@dataclass(slots=True)
class UnitRow:
    """One unit."""

    unit: str
    epoch: int
    policy: str = ""
    """Whose it is, or was until the proof; empty while FREE."""
    state: UnitState = UnitState.CLEARING
    renewed_s: float = 0.0
    deadline_s: float = math.inf
    """When DRAINING turns to CLEARING, and CLEARING to DEAD."""
    may_sleep: bool = False
    """While DRAINING: the engine is asked to sleep, not to end."""


class Transition(NamedTuple):
    """One line of the log: what a row became, when, and why."""

    at_s: float
    unit: str
    epoch: int
    policy: str
    state: UnitState
    why: str


class UnitTable:
    """The rows. Every call says whether it changed something; one that names another epoch or comes late does not."""

    def __init__(self, units: Iterable[str], first_epoch: int) -> None:
        """Every epoch granted here is larger than `first_epoch`, and every one granted before smaller."""
        self.rows = {unit: UnitRow(unit, first_epoch) for unit in units}
        self.num_stale = 0
        """Calls that did not fit the row."""
        self._first_epoch = first_epoch
        self._log: list[Transition] = []

    def grant(self, unit: str, policy: str, now_s: float) -> bool:
        """FREE -> GRANTED under a new epoch."""
        row = self._row(unit, self.rows[unit].epoch, UnitState.FREE)
        if row is None:
            return False
        row.epoch = max(row.epoch, self._first_epoch) + 1
        row.policy, row.renewed_s, row.deadline_s = policy, now_s, math.inf
        return self._turn(row, UnitState.GRANTED, now_s, "wanted")

    def renew(self, unit: str, epoch: int, policy: str, now_s: float) -> bool:
        """The engine itself speaks: GRANTED or ACTIVE -> ACTIVE, renewed."""
        row = self._row(unit, epoch, *HELD)
        if row is None or row.policy != policy:
            return False
        row.renewed_s = now_s
        return row.state is UnitState.ACTIVE or self._turn(row, UnitState.ACTIVE, now_s, "its engine spoke")

    def revoke(self, unit: str, epoch: int, now_s: float, *, grace_s: float, why: str, may_sleep: bool = False) -> bool:
        """GRANTED or ACTIVE -> DRAINING for at most `grace_s`."""
        row = self._row(unit, epoch, *HELD)
        if row is None:
            return False
        row.deadline_s, row.may_sleep = now_s + grace_s, may_sleep
        return self._turn(row, UnitState.DRAINING, now_s, why)

    def clear(self, unit: str, epoch: int, now_s: float, *, within_s: float, why: str) -> bool:
        """GRANTED, ACTIVE or DRAINING -> CLEARING; DEAD unless proved empty `within_s`."""
        row = self._row(unit, epoch, *HELD, UnitState.DRAINING)
        if row is None:
            return False
        row.deadline_s = now_s + within_s
        return self._turn(row, UnitState.CLEARING, now_s, why)

    def free(self, unit: str, epoch: int, now_s: float) -> bool:
        """CLEARING or DEAD -> FREE. To be called with the node's proof in hand, and not without."""
        row = self._row(unit, epoch, UnitState.CLEARING, UnitState.DEAD)
        if row is None:
            return False
        row.policy, row.deadline_s = "", math.inf
        return self._turn(row, UnitState.FREE, now_s, "proved quiet")

    def bury(self, unit: str, epoch: int, now_s: float, *, why: str = "not proved quiet in time") -> bool:
        """CLEARING -> DEAD: nobody can say what runs there, or every engine would fail there."""
        row = self._row(unit, epoch, UnitState.CLEARING)
        return row is not None and self._turn(row, UnitState.DEAD, now_s, why)

    def adopt(self, unit: str, epoch: int, policy: str, now_s: float) -> bool:
        """CLEARING, as at the beginning, -> GRANTED under the epoch that an earlier allocator granted.

        ACTIVE once its engine has spoken: it may be starting still, and has as long for that as any other.
        """
        row = self._row(unit, self._first_epoch, UnitState.CLEARING)
        if row is None:
            return False
        row.epoch, row.policy, row.renewed_s, row.deadline_s = epoch, policy, now_s, math.inf
        return self._turn(row, UnitState.GRANTED, now_s, "of an earlier allocator")

    def silent(self, now_s: float, *, ttl_s: float, start_s: float) -> list[UnitRow]:
        """ACTIVE rows not renewed for longer than the ttl, and GRANTED ones whose engine has not spoken in time."""
        bounds_s = {UnitState.ACTIVE: ttl_s, UnitState.GRANTED: start_s}
        return [row for row in self.rows.values() if now_s - row.renewed_s > bounds_s.get(row.state, math.inf)]

    def overdue(self, now_s: float) -> list[UnitRow]:
        """DRAINING and CLEARING rows past their deadline."""
        ending = (UnitState.DRAINING, UnitState.CLEARING)
        return [row for row in self.rows.values() if row.state in ending and now_s > row.deadline_s]

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` as anybody's silence or delay: the allocator was not there to listen."""
        for row in self.rows.values():
            row.renewed_s += gap_s
            row.deadline_s += gap_s

    def take_log(self) -> list[Transition]:
        """The transitions since the last call, oldest first."""
        taken, self._log = self._log, []
        return taken

    def _row(self, unit: str, epoch: int, *states: UnitState) -> UnitRow | None:
        row = self.rows.get(unit)
        if row is not None and row.epoch == epoch and row.state in states:
            return row
        self.num_stale += 1
        return None

    def _turn(self, row: UnitRow, state: UnitState, now_s: float, why: str) -> bool:
        row.state = state
        self._log.append(Transition(now_s, row.unit, row.epoch, row.policy, state, why))
        return True
