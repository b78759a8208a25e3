"""The node's side of unit leases: which engine may be on which unit of this host, with no process in sight.

Three rules, each of which holds alone against what the others may miss (`tools/check_fencing.py`):
- token: an engine starts only under an epoch above every one that its unit has heard of;
- evict: it starts only once the unit is proved empty; until then what is there is killed;
- verify: the word `cleared` is given only for a unit proved empty, and from then on older epochs are refused.

The shell calls `obey` with what the allocator says and `step` several times a second, and does what `step` answers. It
alone can see whether a unit is empty: it started the processes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mrl.records.units import NodeOrders, NodeReport, UnitOrder, UnitReport


class Action(NamedTuple):
    """What the shell is to do with one unit: start an engine, send SIGTERM, or SIGKILL to all that is there."""

    kind: Literal["start", "end", "kill"]
    unit: str
    epoch: int = 0
    policy: str = ""


class Tenant(NamedTuple):
    """An engine by the lease that it runs under."""

    epoch: int
    policy: str


@dataclass(slots=True)
class GuardedUnit:
    """What the guard remembers of one unit."""

    epoch: int = 0
    """Largest epoch heard."""
    resident: Tenant | None = None
    """Started, and not yet proved gone."""
    admitted: Tenant | None = None
    """Starts as soon as the unit is empty."""
    clearing_epoch: int = 0
    """To be proved empty up to this epoch; 0 when nobody asks."""
    cleared_epoch: int = 0
    kill_at_s: float | None = None
    """The resident was asked to end, and is killed then."""


class NodeGuard:
    """All units of one host."""

    def __init__(self, host: str, units: Iterable[str]) -> None:
        self.units = {unit: GuardedUnit() for unit in units}
        self.life = 0
        """Newest allocator heard."""
        self.num_refused = 0
        """Orders of an earlier allocator, and starts under an epoch that is not new."""
        self._host = host

    def obey(self, message: NodeOrders, now_s: float) -> list[Action]:
        """Take what the allocator says; returns the signals to send at once."""
        if self._is_outdated(message):
            self.num_refused += 1
            return []
        self.life = message.life
        return [action for order in message.orders for action in self._obey(order, now_s)]

    def step(self, now_s: float, is_empty: Callable[[str], bool]) -> list[Action]:
        """What is due. `is_empty` looks for processes of a unit; it is asked only where the answer matters."""
        return [action for unit in self.units for action in self._step(unit, now_s, is_empty)]

    def report(self, released: Iterable[str] = ()) -> NodeReport:
        """What holds now."""
        units = [_report(unit, guarded) for unit, guarded in self.units.items()]
        return NodeReport(host=self._host, life=self.life, units=units, released=list(released))

    def _is_outdated(self, message: NodeOrders) -> bool:
        """A dead allocator's words may arrive late; its successor has already asked what runs here."""
        return message.life < self.life

    def _obey(self, order: UnitOrder, now_s: float) -> list[Action]:
        guarded = self.units.get(order.unit)
        if guarded is None:
            self.num_refused += 1
        elif order.kind == "start":
            self._admit(guarded, order)
        elif order.kind == "clear":
            self._clear(guarded, order.epoch)
        elif guarded.resident and guarded.resident.epoch == order.epoch and guarded.kill_at_s is None:
            guarded.kill_at_s = now_s + order.grace_s
            return [Action("end", order.unit, order.epoch)]
        return []

    def _admit(self, guarded: GuardedUnit, order: UnitOrder) -> None:
        if self._is_new(guarded, order.epoch):
            guarded.epoch = max(guarded.epoch, order.epoch)
            guarded.admitted = Tenant(order.epoch, order.policy)
        elif Tenant(order.epoch, order.policy) not in (guarded.admitted, guarded.resident):
            self.num_refused += 1  # what was admitted already is said again until it runs

    def _clear(self, guarded: GuardedUnit, epoch: int) -> None:
        guarded.epoch = max(guarded.epoch, epoch)
        if guarded.admitted and guarded.admitted.epoch <= epoch:
            guarded.admitted = None
        if guarded.resident and guarded.resident.epoch > epoch:  # it started on an empty unit: that is the proof
            guarded.cleared_epoch = max(guarded.cleared_epoch, epoch)
        elif epoch > guarded.cleared_epoch:
            guarded.clearing_epoch = max(guarded.clearing_epoch, epoch)

    def _is_new(self, guarded: GuardedUnit, epoch: int) -> bool:
        return epoch > guarded.epoch

    def _step(self, unit: str, now_s: float, is_empty: Callable[[str], bool]) -> list[Action]:
        guarded = self.units[unit]
        has_to_go = guarded.admitted is not None or guarded.clearing_epoch > 0
        if guarded.resident is None and not has_to_go:
            return []
        if not is_empty(unit):
            late = guarded.kill_at_s is not None and now_s >= guarded.kill_at_s
            return [Action("kill", unit)] if late or has_to_go else []
        guarded.resident = guarded.kill_at_s = None
        guarded.cleared_epoch = max(guarded.cleared_epoch, guarded.clearing_epoch)
        guarded.clearing_epoch = 0
        if guarded.admitted is None:
            return []
        guarded.resident, guarded.admitted = guarded.admitted, None
        return [Action("start", unit, guarded.resident.epoch, guarded.resident.policy)]


def _report(unit: str, guarded: GuardedUnit) -> UnitReport:
    tenant = guarded.admitted or guarded.resident
    return UnitReport(
        unit=unit,
        epoch=guarded.epoch,
        resident_epoch=tenant.epoch if tenant else 0,
        resident_policy=tenant.policy if tenant else "",
        cleared_epoch=guarded.cleared_epoch,
    )
