"""The node's side of unit leases: which engine may be on which unit of this host. It touches no process itself.

Three rules; `tools/check_fencing.py` shows that each is needed:
- token: an engine starts only under an epoch above every epoch that its unit has heard of;
- evict: an engine starts only once the unit is proved quiet; until then every process there that is awake is killed;
- verify: `cleared` is reported only for a unit proved quiet; from then on older epochs are refused.

A unit is quiet when nothing is on it but engines that sleep. An engine sleeps when it said so and the memory of its
GPUs was given back; an engine on cores never sleeps. A sleeping engine acts again only when it is woken under an epoch
of its own, as if it were started.

The shell, which starts the processes, calls `obey` with the allocator's orders and `step` several times a second, and
carries out the actions that these return. The shell alone can see which processes are on a unit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mrl.records.unit_messages import NodeOrders, NodeReport, UnitOrder, UnitReport


class Action(NamedTuple):
    """An action of the shell on one unit.

    start: start an engine. wake: wake the policy's engine that sleeps there. sleep: ask the engine to sleep. end: ask
    the engine to end, by SIGTERM. kill: send SIGKILL to all processes there that do not sleep.
    """

    kind: Literal["start", "wake", "sleep", "end", "kill"]
    unit: str
    epoch: int = 0
    policy: str = ""


class Seen(NamedTuple):
    """The processes on a unit, as the shell sees them."""

    is_quiet: bool
    """Whether no process is there, or proved sleepers alone."""
    asleep: frozenset[str] = frozenset()
    """Policies of the engines that sleep there."""


class Tenant(NamedTuple):
    """An engine, by the lease that it runs under."""

    epoch: int
    policy: str


@dataclass(slots=True)
class GuardedUnit:
    """The guard's memory of one unit."""

    epoch: int = 0
    """Largest epoch heard."""
    resident: Tenant | None = None
    """The engine that was started or woken, and is not yet proved gone or asleep."""
    admitted: Tenant | None = None
    """The engine that is started, or woken, as soon as the unit is quiet."""
    clearing_epoch: int = 0
    """The unit is to be proved quiet up to this epoch; 0 without such an order."""
    cleared_epoch: int = 0
    """The unit was proved quiet up to this epoch."""
    asked: Literal["", "sleep", "end"] = ""
    """The newest order to the resident."""
    kill_at_s: float | None = None
    """Time at which the resident is killed, when it was asked to sleep or to end, or is being woken."""


class NodeGuard:
    """Guard of the units of one host."""

    def __init__(
        self, host: str, units: Iterable[str], *, wake_s: float = 0.0, types: Mapping[str, str] | None = None
    ) -> None:
        """wake_s: seconds in which an engine has to wake up, or it is killed and started anew.

        types: unit -> its type as this host sees it; part of every report.
        """
        self.units = {unit: GuardedUnit() for unit in units}
        self.life = 0
        """Number of the newest allocator heard."""
        self.slept = self.woken = self.failed_sleeps = self.failed_wakes = 0
        """Numbers of engines that slept, woke, or failed to. An engine that failed was killed or ended by itself, and
        is started anew when wanted."""
        self._host, self._wake_s, self._types = host, wake_s, dict(types or {})

    def obey(self, message: NodeOrders, now_s: float) -> list[Action]:
        """Take the allocator's orders; return the actions to carry out at once."""
        if self._is_outdated(message):
            return []
        self.life = message.life
        return [action for order in message.orders for action in self._obey(order, now_s)]

    def step(self, now_s: float, look: Callable[[str], Seen]) -> list[Action]:
        """Return the actions that are due. `look` tells the processes of a unit, where the guard needs to know them."""
        return [action for unit in self.units for action in self._step(unit, now_s, look)]

    def woke(self, unit: str, epoch: int) -> None:
        """Note that an engine says that it woke up under this epoch."""
        guarded = self.units[unit]
        if guarded.resident and guarded.resident.epoch == epoch and not guarded.asked and guarded.kill_at_s is not None:
            guarded.kill_at_s = None
            self.woken += 1

    def could_not_sleep(self, unit: str) -> None:
        """Note that an engine says that it cannot sleep; it ends."""
        if self.units[unit].asked == "sleep":
            self._fail(self.units[unit])

    def report(self, released: Iterable[str] = (), failed: Mapping[str, str] | None = None) -> NodeReport:
        """Return the state of all units. `failed`: unit out of service -> policy whose engine fails there."""
        units = [
            _report(unit, guarded, self._types.get(unit, ""), (failed or {}).get(unit, ""))
            for unit, guarded in self.units.items()
        ]
        return NodeReport(
            host=self._host,
            life=self.life,
            units=units,
            released=list(released),
            slept=self.slept,
            woken=self.woken,
            failed_sleeps=self.failed_sleeps,
            failed_wakes=self.failed_wakes,
        )

    def _is_outdated(self, message: NodeOrders) -> bool:
        """Whether the orders are of an earlier allocator than the newest one heard; messages may be late."""
        return message.life < self.life

    def _obey(self, order: UnitOrder, now_s: float) -> list[Action]:
        guarded = self.units.get(order.unit)
        if guarded is None:
            return []
        if order.kind == "start":
            self._admit(guarded, order)
        elif order.kind == "clear":
            self._clear(guarded, order.epoch)
        elif guarded.resident and guarded.resident.epoch == order.epoch:
            return self._ask(guarded, order, now_s)
        return []

    def _ask(self, guarded: GuardedUnit, order: UnitOrder, now_s: float) -> list[Action]:
        """Ask the resident once to sleep, and once to end; not to sleep after it was asked to end."""
        assert guarded.resident is not None
        assert order.kind in ("sleep", "end")
        if guarded.asked in (order.kind, "end"):
            return []
        guarded.asked = order.kind
        guarded.kill_at_s = now_s + order.grace_s
        return [Action(order.kind, order.unit, order.epoch, guarded.resident.policy)]

    def _admit(self, guarded: GuardedUnit, order: UnitOrder) -> None:
        if self._is_new(guarded, order.epoch):
            guarded.epoch = max(guarded.epoch, order.epoch)
            guarded.admitted = Tenant(order.epoch, order.policy)

    def _clear(self, guarded: GuardedUnit, epoch: int) -> None:
        guarded.epoch = max(guarded.epoch, epoch)
        if guarded.admitted and guarded.admitted.epoch <= epoch:
            guarded.admitted = None
        if guarded.resident and guarded.resident.epoch > epoch:  # its start was on a quiet unit: that is the proof
            guarded.cleared_epoch = max(guarded.cleared_epoch, epoch)
        elif epoch > guarded.cleared_epoch:
            guarded.clearing_epoch = max(guarded.clearing_epoch, epoch)

    def _is_new(self, guarded: GuardedUnit, epoch: int) -> bool:
        return epoch > guarded.epoch

    def _step(self, unit: str, now_s: float, look: Callable[[str], Seen]) -> list[Action]:
        guarded = self.units[unit]
        has_to_go = guarded.admitted is not None or guarded.clearing_epoch > 0
        if guarded.resident is None and not has_to_go:
            return []
        seen = look(unit)
        # Not quiet is no fault by itself: without an order the resident simply runs.
        if not seen.is_quiet:
            late = guarded.kill_at_s is not None and now_s >= guarded.kill_at_s
            if late or has_to_go:
                self._fail(guarded)
            return [Action("kill", unit)] if late or has_to_go else []
        if guarded.resident and guarded.asked == "sleep" and guarded.resident.policy in seen.asleep:
            self.slept += 1
        else:
            self._fail(guarded)
        guarded.resident, guarded.asked, guarded.kill_at_s = None, "", None
        guarded.cleared_epoch = max(guarded.cleared_epoch, guarded.clearing_epoch)
        guarded.clearing_epoch = 0
        if guarded.admitted is None:
            return []
        guarded.resident, guarded.admitted = guarded.admitted, None
        sleeps = guarded.resident.policy in seen.asleep
        guarded.kill_at_s = now_s + self._wake_s if sleeps else None
        return [Action("wake" if sleeps else "start", unit, guarded.resident.epoch, guarded.resident.policy)]

    def _fail(self, guarded: GuardedUnit) -> None:
        """Count once that the resident did not sleep or wake up in time; from here on it is to end."""
        if guarded.resident and guarded.kill_at_s is not None and guarded.asked != "end":
            self.failed_sleeps += guarded.asked == "sleep"
            self.failed_wakes += guarded.asked == ""
            guarded.asked = "end"


def _report(unit: str, guarded: GuardedUnit, unit_type: str, failed_policy: str) -> UnitReport:
    tenant = guarded.admitted or guarded.resident
    return UnitReport(
        unit=unit,
        epoch=guarded.epoch,
        resident_epoch=tenant.epoch if tenant else 0,
        resident_policy=tenant.policy if tenant else "",
        cleared_epoch=guarded.cleared_epoch,
        unit_type=unit_type,
        failed_policy=failed_policy,
    )
