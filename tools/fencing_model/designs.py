"""The design that mrl follows, and what is left of it when a rule is dropped."""

from collections.abc import Callable

from fencing_model.world import Bounds, Design
from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.allocation.node_guard import Action, GuardedUnit, NodeGuard, Seen
from mrl.allocation.unit_core import UnitCore
from mrl.allocation.unit_leases import UnitRow
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitReport


class NoToken(NodeGuard):
    """Starts whatever it is told to start, unless that is what runs already."""

    def _is_new(self, guarded: GuardedUnit, epoch: int) -> bool:
        return guarded.resident is None or guarded.resident.epoch != epoch


class NoEvict(NodeGuard):
    """Starts an engine without a look at what runs."""

    def _step(self, unit: str, now_s: float, look: Callable[[str], Seen]) -> list[Action]:
        starts = self.units[unit].admitted is not None and not self.units[unit].clearing_epoch
        return super()._step(unit, now_s, (lambda unit: look(unit)._replace(is_quiet=True)) if starts else look)


class NoLifeAtNode(NodeGuard):
    """Obeys the dead."""

    def _is_outdated(self, message: NodeOrders) -> bool:
        return False


class NoVerify(UnitCore):
    """Takes a unit for free once its lease is over."""

    def _is_proof(self, report: UnitReport, row: UnitRow) -> bool:
        return True


class NoLife(UnitCore):
    """Takes what was said to an earlier allocator for news."""

    def _is_to_me(self, report: NodeReport) -> bool:
        return True


class SameEpochs(UnitCore):
    """Counts from the same number in every life."""

    def _epoch_before(self, life: int) -> int:
        return EPOCHS_PER_LIFE


MRL = Design("as built")
WITHOUT = (
    (Design("no token", guard=NoToken), Bounds(messages=2)),
    (Design("no verify", core=NoVerify), Bounds(messages=1)),
    (Design("no evict", guard=NoEvict), Bounds(messages=1, node_restarts=1)),
    (Design("no evict, no verify", core=NoVerify, guard=NoEvict), Bounds(messages=1)),
    (Design("no lives", core=NoLife, guard=NoLifeAtNode), Bounds(messages=2, allocator_restarts=1)),
    (Design("epochs reused", core=SameEpochs), Bounds(messages=2, allocator_restarts=1)),
    (Design("no expiry", expires=False), Bounds(messages=1)),
    (Design("no kill", kills=False), Bounds(messages=1)),
    (Design("asleep at its word", proves_sleep=False), Bounds(messages=1, sleeps=True)),
    (Design("wakes by itself", awaits_word=False), Bounds(messages=1, sleeps=True)),
    (Design("no evict of the awake", guard=NoEvict), Bounds(messages=1, node_restarts=1, sleeps=True)),
    (Design("no verify of sleep", core=NoVerify), Bounds(messages=1, sleeps=True)),
)
"""Each with the fewest faults under which the rule is missed."""
