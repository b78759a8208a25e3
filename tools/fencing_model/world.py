"""One unit and two policies: the state of the whole model, and every step that can come next.

The allocator is `mrl.allocation.unit_core.UnitCore` and the node `mrl.allocation.node_guard.NodeGuard`. The model's
state is theirs, and a step loads them, calls them, and saves them. Time is abstract: whatever may expire may do so at
any moment.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.allocation.node_guard import Action, NodeGuard, Seen, Tenant
from mrl.allocation.objective import Rule
from mrl.allocation.unit_controller import UnitController
from mrl.allocation.unit_core import UnitCore, UnitSettings
from mrl.allocation.unit_leases import OWNED, UnitState
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitOrder, UnitReport

UNIT, HOST, POLICIES = "cpu:0", "node", ("a", "b")
GRACE_S, BEFORE_S, AFTER_S = 1.0, 0.0, 2.0


class Process(NamedTuple):
    """An engine on the unit."""

    epoch: int
    policy: str
    is_stuck: bool = False
    """Whether it is stopped or hangs: it does not act on SIGTERM."""
    is_doomed: bool = False
    """Whether SIGKILL is on its way."""
    rest: Literal["", "said", "asleep", "orphaned"] = ""
    """"said": it says that it sleeps, and could yet act. "asleep": its memory is given back, and it cannot act.
    "orphaned": the node that saw this has died."""

    @property
    def may_act(self) -> bool:
        """Whether the engine could use the unit."""
        return self.rest not in ("asleep", "orphaned")


class Report(NamedTuple):
    """A `NodeReport` about the one unit."""

    life: int
    epoch: int
    resident_epoch: int
    resident_policy: str
    cleared_epoch: int


class Orders(NamedTuple):
    """`NodeOrders` with at most one order."""

    life: int
    kind: str = ""
    epoch: int = 0
    policy: str = ""


Message = Report | Orders


class Row(NamedTuple):
    """The allocator's state of the unit."""

    epoch: int
    policy: str
    state: UnitState
    may_sleep: bool = False


class Guarded(NamedTuple):
    """The node's state of the unit: a `GuardedUnit`, with whether there is a deadline in place of its time."""

    life: int = 0
    epoch: int = 0
    resident: Tenant | None = None
    admitted: Tenant | None = None
    clearing_epoch: int = 0
    cleared_epoch: int = 0
    asked: Literal["", "sleep", "end"] = ""
    has_deadline: bool = False


class World(NamedTuple):
    """State of the whole model: allocator, node, engines and messages under way."""

    row: Row = Row(EPOCHS_PER_LIFE, "", UnitState.CLEARING)
    guarded: Guarded = Guarded()
    processes: tuple[Process, ...] = ()
    """Engines on the unit, sorted, as are the messages."""
    messages: tuple[Message, ...] = ()
    life: int = 1
    grants: int = 0
    node_restarts: int = 0


NOBODY_DECIDES = UnitController(
    {}, {}, Rule(), floor_units=0, switching_share=1.0, slots_per_unit=1, hung_s=1.0, weights={}, now_s=0.0
)
"""Controller without policies: the search gives units to policies in its place."""


@dataclass(frozen=True)
class Bounds:
    """Numbers of grants, messages under way and restarts to which the search goes."""

    grants: int = 2
    messages: int = 2
    allocator_restarts: int = 0
    node_restarts: int = 0
    sleeps: bool = False
    """Whether engines are also asked to sleep."""

    def __str__(self) -> str:
        """Text of these bounds in the table."""
        restarts = [
            name for name, count in (("allocator", self.allocator_restarts), ("node", self.node_restarts)) if count
        ]
        again = f", {' and '.join(restarts)} restarts" if restarts else ""
        sleeps = ", sleepers" if self.sleeps else ""
        return f"{self.grants} grants, {self.messages} messages{sleeps}{again}"


@dataclass(frozen=True)
class Design:
    """A design of unit leases: the real parts, or parts with a rule dropped."""

    name: str
    core: type[UnitCore] = UnitCore
    guard: type[NodeGuard] = NodeGuard
    expires: bool = True
    """Whether the allocator acts on silence and on deadlines."""
    kills: bool = True
    """Whether SIGKILL follows SIGTERM."""
    proves_sleep: bool = True
    """Whether an engine counts as asleep only once its memory is given back, and not at its word."""
    awaits_word: bool = True
    """Whether an engine that sleeps goes on sleeping until its node wakes it."""


Event = Literal["", "start"]


class Steps:
    """Steps that can come next in a design."""

    def __init__(self, design: Design, bounds: Bounds) -> None:
        self._design, self._bounds = design, bounds
        self._settings = UnitSettings(ttl_s=10.0, start_s=10.0, grace_s=GRACE_S)
        self._fits = {policy: frozenset({UNIT}) for policy in POLICIES}

    def budget_left(self, world: World) -> bool:
        """Whether another grant is within the bounds."""
        return world.grants < self._bounds.grants

    def after(self, world: World) -> Iterator[tuple[Event, World]]:
        """Every step that can come next: (event, world after it)."""
        yield from self._allocator(world)
        yield from self._node(world)
        yield from self._mail(world)
        yield from self._processes(world)

    def _allocator(self, world: World) -> Iterator[tuple[Event, World]]:
        row = world.row
        if row.state is UnitState.FREE and self.budget_left(world):
            for policy in POLICIES:
                core = self._core(world)
                core.table.grant(UNIT, policy, BEFORE_S)
                yield "", world._replace(row=_row(core), grants=world.grants + 1)
        for process in world.processes:
            core, speaks = self._core(world), not (process.is_stuck or process.rest)
            if speaks and core.table.renew(UNIT, process.epoch, process.policy, BEFORE_S):
                yield "", world._replace(row=_row(core))
        if self._design.expires and row.state in OWNED:
            for may_sleep in (False, True)[: 1 + self._bounds.sleeps]:
                core = self._core(world)
                core.table.revoke(UNIT, row.epoch, BEFORE_S, grace_s=GRACE_S, why="", may_sleep=may_sleep)
                yield "", world._replace(row=_row(core))
        if self._design.expires and row.state is UnitState.DRAINING:
            core = self._core(world)
            core.table.clear(UNIT, row.epoch, BEFORE_S, within_s=GRACE_S, why="")
            yield "", world._replace(row=_row(core))
        if world.life <= self._bounds.allocator_restarts:
            after = world._replace(life=world.life + 1)
            yield "", after._replace(row=_row(self._new_core(after)))

    def _node(self, world: World) -> Iterator[tuple[Event, World]]:
        for now_s in (BEFORE_S, AFTER_S):
            guard = self._guard(world)
            actions = guard.step(now_s, lambda _unit: self._seen(world))
            yield _event(actions), self._act(world._replace(guarded=_guarded(guard)), actions)
        for process in world.processes:
            guard = self._guard(world)
            if not (process.is_stuck or process.rest):
                guard.woke(UNIT, process.epoch)
                yield "", world._replace(guarded=_guarded(guard))
        yield "", self._post(world, _report(self._guard(world).report()))
        if world.node_restarts < self._bounds.node_restarts:  # orders on their way die with its connection
            messages = tuple(one for one in world.messages if isinstance(one, Report))
            processes = tuple(sorted(map(_unknown, world.processes)))
            yield (
                "",
                world._replace(
                    guarded=Guarded(), messages=messages, processes=processes, node_restarts=world.node_restarts + 1
                ),
            )

    def _mail(self, world: World) -> Iterator[tuple[Event, World]]:
        """Lose each message, deliver it, or deliver it and keep a copy on its way."""
        for message in dict.fromkeys(world.messages):
            rest = list(world.messages)
            rest.remove(message)
            taken = world._replace(messages=tuple(rest))
            yield "", taken
            for before in (taken, world):
                if isinstance(message, Report):
                    core = self._core(before)
                    [answer] = core.handle(_node_report(message), BEFORE_S)
                    assert isinstance(answer, NodeOrders)
                    yield "", self._post(before._replace(row=_row(core)), _orders(answer))
                else:
                    guard = self._guard(before)
                    actions = guard.obey(_node_orders(message), BEFORE_S)
                    yield "", self._act(before._replace(guarded=_guarded(guard)), actions)

    def _processes(self, world: World) -> Iterator[tuple[Event, World]]:
        """Let each engine end, get stuck, say that it sleeps if it was asked to, and then give its memory back."""
        for process in dict.fromkeys(world.processes):
            others = list(world.processes)
            others.remove(process)
            if process.is_doomed or not process.is_stuck:
                yield "", world._replace(processes=tuple(others))
            for changed in self._changes(world, process):
                yield "", world._replace(processes=tuple(sorted([*others, changed])))

    def _changes(self, world: World, process: Process) -> Iterator[Process]:
        is_asked = world.guarded.asked == "sleep" and world.guarded.resident == (process.epoch, process.policy)
        if process.is_doomed:
            return
        if not process.is_stuck and not process.rest:
            yield process._replace(is_stuck=True)
            if is_asked:
                yield process._replace(rest="said")
        elif process.rest == "said":
            yield process._replace(rest="asleep")
        elif process.rest and not self._design.awaits_word:
            yield process._replace(rest="")

    def _seen(self, world: World) -> Seen:
        """The node's look at the processes on the unit."""
        restful = ("asleep",) if self._design.proves_sleep else ("said", "asleep")
        asleep = [process for process in world.processes if process.rest in restful and not process.is_doomed]
        return Seen(len(asleep) == len(world.processes), frozenset(process.policy for process in asleep))

    def _act(self, world: World, actions: list[Action]) -> World:
        processes = list(world.processes)
        for action in actions:
            if action.kind == "start":
                processes.append(Process(action.epoch, action.policy))
            elif action.kind == "wake":
                sleeper = next(one for one in processes if one.policy == action.policy and one.rest)
                processes[processes.index(sleeper)] = Process(action.epoch, action.policy)
            elif action.kind == "kill" and self._design.kills:
                processes = [one if one.rest == "asleep" else one._replace(is_doomed=True) for one in processes]
        return world._replace(processes=tuple(sorted(processes)))

    def _post(self, world: World, message: Message) -> World:
        """Put a message on its way; it is lost, as any may be, if a copy is on its way or the bound is reached."""
        if message in world.messages or len(world.messages) >= self._bounds.messages:
            return world
        messages = sorted([*world.messages, message], key=lambda one: (type(one).__name__, one))
        return world._replace(messages=tuple(messages))

    def _core(self, world: World) -> UnitCore:
        core = self._new_core(world)
        row = core.table.rows[UNIT]
        row.epoch, row.policy, row.state, row.may_sleep = world.row
        return core

    def _new_core(self, world: World) -> UnitCore:
        return self._design.core(self._fits, NOBODY_DECIDES, self._settings, BEFORE_S, life=world.life)

    def _guard(self, world: World) -> NodeGuard:
        guard, saved = self._design.guard(HOST, [UNIT], wake_s=GRACE_S), world.guarded
        unit = guard.units[UNIT]
        guard.life, unit.epoch, unit.resident, unit.admitted = saved.life, saved.epoch, saved.resident, saved.admitted
        unit.clearing_epoch, unit.cleared_epoch = saved.clearing_epoch, saved.cleared_epoch
        unit.asked, unit.kill_at_s = saved.asked, GRACE_S if saved.has_deadline else None
        return guard


def _unknown(process: Process) -> Process:
    """Engine as a restarted node sees it, which did not see it fall asleep. Nobody is left who could wake a sleeper."""
    return process._replace(rest="orphaned" if process.rest == "asleep" else "")


def _row(core: UnitCore) -> Row:
    row = core.table.rows[UNIT]
    may_sleep = row.may_sleep and row.state is UnitState.DRAINING  # it has no meaning in other states
    return Row(row.epoch, row.policy, row.state, may_sleep)


def _guarded(guard: NodeGuard) -> Guarded:
    unit = guard.units[UNIT]
    return Guarded(
        guard.life, unit.epoch, unit.resident, unit.admitted, unit.clearing_epoch, unit.cleared_epoch,
        unit.asked, unit.kill_at_s is not None,
    )  # fmt: skip


def _event(actions: list[Action]) -> Event:
    return "start" if any(action.kind in ("start", "wake") for action in actions) else ""


def _report(report: NodeReport) -> Report:
    [unit] = report.units
    return Report(report.life, unit.epoch, unit.resident_epoch, unit.resident_policy, unit.cleared_epoch)


def _node_report(report: Report) -> NodeReport:
    unit = UnitReport(
        unit=UNIT,
        epoch=report.epoch,
        resident_epoch=report.resident_epoch,
        resident_policy=report.resident_policy,
        cleared_epoch=report.cleared_epoch,
    )
    return NodeReport(host=HOST, life=report.life, units=[unit])


def _orders(message: NodeOrders) -> Orders:
    for order in message.orders:
        return Orders(message.life, order.kind, order.epoch, order.policy)
    return Orders(message.life)


def _node_orders(orders: Orders) -> NodeOrders:
    if not orders.kind:
        return NodeOrders(life=orders.life, orders=[])
    assert orders.kind in ("start", "sleep", "end", "clear")
    order = UnitOrder(unit=UNIT, epoch=orders.epoch, kind=orders.kind, policy=orders.policy, grace_s=GRACE_S)  # type: ignore[arg-type]
    return NodeOrders(life=orders.life, orders=[order])
