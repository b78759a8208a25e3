"""Leases of whole units: a GPU, several GPUs, or a set of CPU cores; each unit runs one engine of one policy.

FREE -> GRANTED -> ACTIVE -> DRAINING -> CLEARING -> FREE; DEAD is a unit that could not be proved quiet in time. Every
transition is a compare-and-set on (epoch, states it may come from): a message about an older lease changes nothing.
Epochs of a unit only grow. CLEARING ends by proof from the unit's node and by nothing else, so that a unit never has
two owners.

A table begins with every unit in CLEARING: an engine of an earlier allocator may still run there. No epoch is used by
two allocators: after restarts of an allocator and of a node, a late message could otherwise mean either lease.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class UnitState(StrEnum):
    """State of a unit's lease."""

    FREE = "free"
    """The unit is proved quiet and has no owner. Engines may sleep on it."""
    GRANTED = "granted"
    """The node is told to start an engine. The engine has not spoken yet."""
    ACTIVE = "active"
    """The engine renews its lease."""
    DRAINING = "draining"
    """The engine is asked to end, or to sleep, until the deadline."""
    CLEARING = "clearing"
    """The node is to kill all processes that are left and awake, and to prove that none is."""
    DEAD = "dead"
    """No proof came by the deadline, or engines fail there again and again. A later proof still frees the unit."""


OWNED = frozenset({UnitState.GRANTED, UnitState.ACTIVE})
"""States in which a policy owns the unit and may go on."""


@dataclass(slots=True)
class UnitRow:
    """The lease of one unit."""

    unit: str
    epoch: int
    policy: str = ""
    """The owner, or the owner of before until the proof; empty while FREE."""
    state: UnitState = UnitState.CLEARING
    renewed_s: float = 0.0
    deadline_s: float = math.inf
    """Time at which DRAINING turns to CLEARING, and CLEARING to DEAD."""
    may_sleep: bool = False
    """Whether the engine, while DRAINING, is asked to sleep, not to end."""


class Transition(NamedTuple):
    """One line of the log: the new state of a unit, its time, and its reason."""

    at_s: float
    unit: str
    epoch: int
    policy: str
    state: UnitState
    why: str


class UnitTable:
    """The lease of every unit. A call returns whether it changed the lease; a wrong epoch or state changes nothing."""

    def __init__(self, units: Iterable[str], first_epoch: int) -> None:
        """`first_epoch` is smaller than every epoch of this table, and larger than every epoch of earlier tables."""
        self.rows = {unit: UnitRow(unit, first_epoch) for unit in units}
        self._first_epoch = first_epoch
        self._log: list[Transition] = []

    def grant(self, unit: str, policy: str, now_s: float) -> bool:
        """Grant a unit: FREE -> GRANTED under a new epoch."""
        row = self._row(unit, self.rows[unit].epoch, UnitState.FREE)
        if row is None:
            return False
        row.epoch = max(row.epoch, self._first_epoch) + 1
        row.policy, row.renewed_s, row.deadline_s = policy, now_s, math.inf
        return self._turn(row, UnitState.GRANTED, now_s, "wanted")

    def renew(self, unit: str, epoch: int, policy: str, now_s: float) -> bool:
        """Renew a lease whose engine speaks: GRANTED or ACTIVE -> ACTIVE."""
        row = self._row(unit, epoch, *OWNED)
        if row is None or row.policy != policy:
            return False
        row.renewed_s = now_s
        return row.state is UnitState.ACTIVE or self._turn(row, UnitState.ACTIVE, now_s, "its engine spoke")

    def wait(self, unit: str, epoch: int, policy: str, now_s: float) -> bool:
        """Keep a lease GRANTED as if it were granted now: the worker speaks, and its engine has not begun to start."""
        row = self._row(unit, epoch, UnitState.GRANTED)
        if row is None or row.policy != policy:
            return False
        row.renewed_s = now_s
        return True

    def revoke(self, unit: str, epoch: int, now_s: float, *, grace_s: float, why: str, may_sleep: bool = False) -> bool:
        """Take a lease back: GRANTED or ACTIVE -> DRAINING for at most `grace_s`."""
        row = self._row(unit, epoch, *OWNED)
        if row is None:
            return False
        row.deadline_s, row.may_sleep = now_s + grace_s, may_sleep
        return self._turn(row, UnitState.DRAINING, now_s, why)

    def clear(self, unit: str, epoch: int, now_s: float, *, within_s: float, why: str) -> bool:
        """Order proof of a quiet unit: GRANTED, ACTIVE or DRAINING -> CLEARING; DEAD without the proof `within_s`."""
        row = self._row(unit, epoch, *OWNED, UnitState.DRAINING)
        if row is None:
            return False
        row.deadline_s = now_s + within_s
        return self._turn(row, UnitState.CLEARING, now_s, why)

    def free(self, unit: str, epoch: int, now_s: float) -> bool:
        """Free a unit: CLEARING or DEAD -> FREE. To be called with the node's proof alone."""
        row = self._row(unit, epoch, UnitState.CLEARING, UnitState.DEAD)
        if row is None:
            return False
        row.policy, row.deadline_s = "", math.inf
        return self._turn(row, UnitState.FREE, now_s, "proved quiet")

    def bury(self, unit: str, epoch: int, now_s: float, *, why: str = "not proved quiet in time") -> bool:
        """Give a unit up: CLEARING -> DEAD. It is not proved quiet, or engines fail there."""
        row = self._row(unit, epoch, UnitState.CLEARING)
        return row is not None and self._turn(row, UnitState.DEAD, now_s, why)

    def adopt(self, unit: str, epoch: int, policy: str, now_s: float) -> bool:
        """Adopt the lease of an earlier allocator, under its epoch: CLEARING, as at the beginning, -> GRANTED.

        The engine may still be starting: the lease turns ACTIVE once the engine has spoken, as any lease does.
        """
        row = self._row(unit, self._first_epoch, UnitState.CLEARING)
        if row is None:
            return False
        row.epoch, row.policy, row.renewed_s, row.deadline_s = epoch, policy, now_s, math.inf
        return self._turn(row, UnitState.GRANTED, now_s, "of an earlier allocator")

    def silent(self, now_s: float, *, ttl_s: float, start_s: float) -> list[UnitRow]:
        """Return ACTIVE rows not renewed within the ttl, and GRANTED ones whose engine has not spoken in time."""
        bounds_s = {UnitState.ACTIVE: ttl_s, UnitState.GRANTED: start_s}
        return [row for row in self.rows.values() if now_s - row.renewed_s > bounds_s.get(row.state, math.inf)]

    def overdue(self, now_s: float) -> list[UnitRow]:
        """Return DRAINING and CLEARING rows past their deadline."""
        ending = (UnitState.DRAINING, UnitState.CLEARING)
        return [row for row in self.rows.values() if row.state in ending and now_s > row.deadline_s]

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` as silence or delay: the allocator itself was not there to listen."""
        for row in self.rows.values():
            row.renewed_s += gap_s
            row.deadline_s += gap_s

    def take_log(self) -> list[Transition]:
        """Return the transitions since the last call, oldest first."""
        taken, self._log = self._log, []
        return taken

    def _row(self, unit: str, epoch: int, *states: UnitState) -> UnitRow | None:
        row = self.rows.get(unit)
        if row is not None and row.epoch == epoch and row.state in states:
            return row
        return None

    def _turn(self, row: UnitRow, state: UnitState, now_s: float, why: str) -> bool:
        row.state = state
        self._log.append(Transition(now_s, row.unit, row.epoch, row.policy, state, why))
        return True


class LeaseCounts:
    """Leases that began and that ended since the allocator started, counted from transitions."""

    def __init__(self) -> None:
        self.begun = Counter[str]()
        """Policy -> leases granted."""
        self.ended = Counter[tuple[str, str]]()
        """(policy, reason) -> leases that ended."""
        self._owners: dict[str, str] = {}
        """Unit -> policy with a lease that has not ended."""

    def add(self, transitions: Iterable[Transition]) -> None:
        """Count transitions. A lease ends once: when it is taken back, or when its engine is gone before."""
        for one in transitions:
            if one.state in OWNED:
                self.begun[one.policy] += one.state is UnitState.GRANTED
                self._owners[one.unit] = one.policy
            elif self._owners.pop(one.unit, None) is not None:
                self.ended[one.policy, one.why] += 1


class UnservedPolicies:
    """Policies that no unit serves any more: all units that their engines fit are dead, or their engines fail there.

    A policy's engine is in doubt on a unit where it failed again and again, until it speaks there.
    """

    def __init__(self, fits: Mapping[str, frozenset[str]], now_s: float) -> None:
        """`fits`: policy -> units that its engine fits."""
        self._fits = dict(fits)
        self._served_s = dict.fromkeys(fits, now_s)
        """Policy -> time at which a unit served it last, or could have."""
        self._doubts: set[tuple[str, str]] = set()

    def failed(self, unit: str, policy: str) -> None:
        """Note that the policy's engine was given up on a unit."""
        self._doubts.add((unit, policy))

    def spoke(self, unit: str, policy: str, now_s: float) -> None:
        """Note that the policy's engine runs on a unit."""
        self._doubts.discard((unit, policy))
        self._served_s[policy] = now_s

    def is_doubtful(self, unit: str, policy: str) -> bool:
        """Whether the policy's engine failed on a unit and has not spoken there since."""
        return (unit, policy) in self._doubts

    def release(self, policy: str) -> None:
        """Leave out a policy that needs no engine any more."""
        self._fits.pop(policy, None)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s`: the allocator itself was not there to listen."""
        self._served_s = {policy: served_s + gap_s for policy, served_s in self._served_s.items()}

    def look(self, rows: Mapping[str, UnitRow], now_s: float) -> None:
        """Note the policies that some unit may still serve. To be called every tick."""
        for policy, units in self._fits.items():
            if any(rows[unit].state is not UnitState.DEAD and (unit, policy) not in self._doubts for unit in units):
                self._served_s[policy] = now_s

    def longer_than(self, bound_s: float, now_s: float) -> list[str]:
        """Return the policies that no unit has served for longer than `bound_s`."""
        return [policy for policy in self._fits if now_s - self._served_s[policy] > bound_s]
