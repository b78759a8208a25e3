"""The design of mrl's unit leases, and designs with one of its rules dropped."""

from collections.abc import Callable

from fencing_model.world import Bounds, Design
from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.allocation.node_guard import Action, GuardedUnit, NodeGuard, Seen
from mrl.allocation.unit_core import UnitCore
from mrl.allocation.unit_leases import UnitRow
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitReport


class NoToken(NodeGuard):
    """Guard without fencing tokens: it starts any epoch that it is told to, unless that one runs already."""

    def _is_new(self, guarded: GuardedUnit, epoch: int) -> bool:
        return guarded.resident is None or guarded.resident.epoch != epoch


class NoEvict(NodeGuard):
    """Guard that starts an engine without a look at the processes on the unit."""

    def _step(self, unit: str, now_s: float, look: Callable[[str], Seen]) -> list[Action]:
        starts = self.units[unit].admitted is not None and not self.units[unit].clearing_epoch
        return super()._step(unit, now_s, (lambda unit: look(unit)._replace(is_quiet=True)) if starts else look)


class NoLifeAtNode(NodeGuard):
    """Guard that obeys orders of earlier lives of the allocator."""

    def _is_outdated(self, message: NodeOrders) -> bool:
        return False


class NoVerify(UnitCore):
    """Allocator core that takes a unit for free once its lease is over, without proof that no engine is on it."""

    def _is_proof(self, report: UnitReport, row: UnitRow) -> bool:
        return True


class NoLife(UnitCore):
    """Allocator core that takes reports to earlier lives of the allocator for its own."""

    def _is_to_me(self, report: NodeReport) -> bool:
        return True


class SameEpochs(UnitCore):
    """Allocator core that counts epochs from the same number in every life."""

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
"""Designs with a rule dropped, each with the fewest faults under which that shows."""
