"""The allocator of whole units: leases from reports of nodes, engines and learners. No socket, clock or file.

A `UnitController` decides how many units of which type each policy should have. The leases follow here, one unit at a
time, and never faster than the proofs come in.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.allocation.engine_totals import EngineTotals, UnitIdle
from mrl.allocation.meter import ONLY_TYPE
from mrl.allocation.unit_controller import UnitController
from mrl.allocation.unit_leases import OWNED, Transition, UnitRow, UnitState, UnitTable, UnservedPolicies
from mrl.records.leases import LearnerReport, LeaseGrant, LeaseRequest, ReportAck, UnitReply, UnitRequest
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitOrder, UnitReport


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """Bounds of the leases of units."""

    ttl_s: float
    """Seconds without a renewal after which a lease is taken back."""
    start_s: float
    """Seconds after the grant in which the engine has to speak, or its lease is taken back."""
    grace_s: float
    """Seconds after which an engine that was asked to end is killed."""
    clear_s: float = 30.0
    """Seconds after which a unit that is not proved quiet counts as dead, until it is proved."""
    sleeping_policies: frozenset[str] = frozenset()
    """An engine of these policies is asked to sleep when another policy gets its unit; any other is asked to end."""
    slots_per_unit: int = 1
    """Requests that one engine may run at once."""
    unserved_s: float = 600.0
    """Seconds after which a policy that no unit could serve counts as unserved."""


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The units of one policy of one type."""

    target_units: int
    held_units: int
    tokens_per_s: float
    """Tokens per second of a full engine on such a unit; 0 while unknown."""


@dataclass(frozen=True, slots=True)
class UnitShare:
    """The units of one policy after a tick."""

    policy: str
    target_units: int
    held_units: int
    demand_units: float
    """Units that would just keep the policy's learner busy; 0 while unknown."""
    progress: float
    """Busy share of the policy's learner."""
    num_reports: int
    by_type: Mapping[str, TypeShare] = field(default_factory=dict)
    """Type -> share, where the units that the policy fits are of several types."""


class UnitCore:
    """Leases of units to policies. An engine of a policy runs on the units that `fits` names for it."""

    def __init__(
        self,
        fits: Mapping[str, frozenset[str]],
        rule: UnitController,
        settings: UnitSettings,
        now_s: float,
        *,
        life: int,
        types: Mapping[str, str] | None = None,
    ) -> None:
        """life: number of this allocator, larger than the number of every earlier allocator of the run.

        types: unit -> its type. A unit that is not in it is of the type that its host reports.
        """
        self._first_epoch = self._epoch_before(life)
        self.table = UnitTable(sorted(frozenset().union(*fits.values())), self._first_epoch)
        self.rule = rule
        self._named = frozenset(types or {})
        self.types = dict.fromkeys(self.table.rows, ONLY_TYPE) | dict(types or {})
        """Unit -> its type."""
        self.targets: dict[str, dict[str, int]] = {policy: {} for policy in fits}
        """Units per policy and type."""
        self.newest: dict[str, NodeReport] = {}
        """Host -> its newest report."""
        self.idle = UnitIdle(self.table.rows, now_s)
        """Idle time of units."""
        self._fits, self._settings, self._life = fits, settings, life
        self._unserved = UnservedPolicies(fits, now_s)
        self._totals = EngineTotals()
        self._granted_s: dict[str, float] = {}
        self._now_s = now_s

    def handle(self, message: UnitRequest, now_s: float) -> list[UnitReply]:
        """Handle one message; return the answers."""
        self._notice_gap(now_s)
        match message:
            case NodeReport():
                return [self._hear(message, now_s)]
            case LeaseRequest() if message.policy in self._fits:
                return [self._renew(message, now_s)]
            case LearnerReport() if message.policy in self._fits:
                self.rule.add_report(message, now_s)
                return [ReportAck(policy=message.policy)]
        return []

    def tick(self, now_s: float) -> list[UnitShare]:
        """Take back expired leases, decide anew, and move units; return the share of every policy.

        To be called more often than ttl / 2.
        """
        self._notice_gap(now_s)
        self._expire(now_s)
        self.targets = self.rule.targets(self._usable(), self._held(), self._starting_s(now_s), now_s)
        self._take_back(now_s)
        self._give(now_s)
        self._unserved.look(self.table.rows, now_s)
        held = self._held()
        return [self._share(policy, held[policy]) for policy in self._fits]

    def release(self, policy: str, now_s: float) -> None:
        """Take back all units of a policy that was stopped or is done; it gets no unit again."""
        self.rule.release(policy)
        self._unserved.release(policy)
        self.targets[policy] = {}
        for row in self._rows_of(policy):
            self._revoke(row, now_s, "its policy needs no engine any more")

    def unserved(self, now_s: float) -> list[str]:
        """Return the policies whose units were all dead, or failed, for longer than the bound."""
        return self._unserved.longer_than(self._settings.unserved_s, now_s)

    def orders(self, report: NodeReport) -> NodeOrders:
        """Return the orders to the node of a report, complete in themselves: no order depends on an earlier one."""
        rows = (self.table.rows.get(unit.unit) for unit in report.units)
        orders = [order for row in rows if row and (order := self._order(row))]
        return NodeOrders(life=self._life, orders=orders)

    def take_log(self) -> list[Transition]:
        """Return the transitions since the last call."""
        return self.table.take_log()

    def _hear(self, report: NodeReport, now_s: float) -> NodeOrders:
        if not self._is_to_me(report):
            return NodeOrders(life=self._life, orders=[])
        self.newest[report.host] = report
        for policy in report.released:
            if policy in self._fits:
                self.release(policy, now_s)
        known = [unit for unit in report.units if unit.unit in self.table.rows]
        # Granted at once, not at the next tick, but only where a unit became free: most reports tell nothing new.
        if sum(self._hear_unit(unit, now_s) for unit in known):
            self._give(now_s)
        return self.orders(report)

    def _hear_unit(self, report: UnitReport, now_s: float) -> bool:
        """Take the report of one unit; return whether the unit has become free."""
        row, clear_s = self.table.rows[report.unit], self._settings.clear_s
        if report.unit not in self._named:
            self.types[report.unit] = report.unit_type
        is_there = report.resident_epoch == row.epoch
        # An engine of an earlier allocator goes on under its epoch, until this allocator has given the unit a lease.
        if row.epoch == self._first_epoch and report.resident_policy in self._fits and report.resident_epoch:
            self.table.adopt(row.unit, report.resident_epoch, report.resident_policy, now_s)
        elif row.state in (UnitState.CLEARING, UnitState.DEAD) and self._is_proof(report, row):
            return self._free(row, report.failed_policy, now_s)
        # A report older than the lease names a smaller epoch: it tells nothing about the engine of this lease.
        elif row.state in (*OWNED, UnitState.DRAINING) and report.epoch >= row.epoch and not is_there:
            self.table.clear(row.unit, row.epoch, now_s, within_s=clear_s, why="its engine is gone")
        return False

    def _free(self, row: UnitRow, failed_policy: str, now_s: float) -> bool:
        """Free a unit that is proved quiet. A unit on which an engine fails is dead while its node reports that."""
        if not failed_policy:
            return self.table.free(row.unit, row.epoch, now_s)
        if row.state is UnitState.CLEARING:
            self.table.bury(row.unit, row.epoch, now_s, why="its engines fail")
            self._unserved.failed(row.unit, failed_policy)
        return False

    def _epoch_before(self, life: int) -> int:
        return life * EPOCHS_PER_LIFE

    def _is_to_me(self, report: NodeReport) -> bool:
        """Whether the report answers this allocator; a report to an earlier allocator tells of the past."""
        return report.life == self._life

    def _is_proof(self, report: UnitReport, row: UnitRow) -> bool:
        return report.cleared_epoch >= row.epoch

    def _order(self, row: UnitRow) -> UnitOrder | None:
        match row.state:
            case UnitState.GRANTED:
                return UnitOrder(unit=row.unit, epoch=row.epoch, kind="start", policy=row.policy)
            case UnitState.DRAINING:
                kind: Literal["sleep", "end"] = "sleep" if row.may_sleep else "end"
                return UnitOrder(unit=row.unit, epoch=row.epoch, kind=kind, grace_s=self._settings.grace_s)
            case UnitState.CLEARING | UnitState.DEAD:
                return UnitOrder(unit=row.unit, epoch=row.epoch, kind="clear")
        return None

    def _renew(self, request: LeaseRequest, now_s: float) -> LeaseGrant:
        """Renew an engine's lease: with its slots while the unit is its own, with none before and afterwards."""
        if request.awaits_turn:
            if self.table.wait(request.unit, request.unit_epoch, request.policy, now_s):
                self._granted_s[request.unit] = now_s
            return self._grant(request, 0)
        row = self.table.rows.get(request.unit)
        was_granted = row is not None and row.state is UnitState.GRANTED
        if row is not None and row.epoch == request.unit_epoch:
            self.idle.add(request)
        is_own = self.table.renew(request.unit, request.unit_epoch, request.policy, now_s)
        if is_own:
            self._unserved.spoke(request.unit, request.policy, now_s)
        granted_s = self._granted_s.get(request.unit)
        if is_own and was_granted and granted_s is not None:  # a grant of an earlier allocator has no known time
            self.rule.add_switch(request.policy, now_s - granted_s)
        if is_own and (increment := self._totals.increment(request, now_s)) is not None:
            self.rule.add_rollout(request.policy, self.types[request.unit], increment)
        return self._grant(request, self._settings.slots_per_unit if is_own else 0)

    def _grant(self, request: LeaseRequest, slots: int) -> LeaseGrant:
        return LeaseGrant(
            holder=request.holder,
            policy=request.policy,
            slots=slots,
            epoch=request.unit_epoch,
            ttl_s=self._settings.ttl_s,
            sequence=request.sequence,
        )

    def _expire(self, now_s: float) -> None:
        settings = self._settings
        for row in self.table.silent(now_s, ttl_s=settings.ttl_s, start_s=settings.start_s):
            self._revoke(row, now_s, "its engine is silent")
        for row in self.table.overdue(now_s):
            if row.state is UnitState.DRAINING:
                self.table.clear(row.unit, row.epoch, now_s, within_s=settings.clear_s, why="it did not end in time")
            else:
                self.table.bury(row.unit, row.epoch, now_s)

    def _take_back(self, now_s: float) -> None:
        """Take back the units above the targets, the newest grants first."""
        for policy, held in self._held().items():
            may_sleep = policy in self._settings.sleeping_policies
            above = {kind: count - self._target(policy, kind) for kind, count in held.items()}
            for row in sorted(self._rows_of(policy), key=lambda row: -self._granted_s.get(row.unit, 0.0)):
                if above[self.types[row.unit]] > 0:
                    above[self.types[row.unit]] -= 1
                    self._revoke(row, now_s, "another policy needs it more", may_sleep=may_sleep)

    def _give(self, now_s: float) -> None:
        """Grant free units to the fitting policies that are furthest below their targets.

        A policy whose engine failed on a unit comes last there.
        """
        held = self._held()
        for unit, row in self.table.rows.items():
            kind = self.types[unit]
            short = {policy: self._target(policy, kind) - held[policy][kind] for policy in self._fits}
            takers = [policy for policy in self._fits if unit in self._fits[policy] and short[policy] > 0]
            if row.state is UnitState.FREE and takers:
                taker = max(takers, key=lambda policy: self._merit(unit, policy, short[policy]))
                self.table.grant(unit, taker, now_s)
                self._granted_s[unit] = now_s
                held[taker][kind] += 1

    def _merit(self, unit: str, policy: str, short_units: int) -> tuple[bool, int, str]:
        return not self._unserved.is_doubtful(unit, policy), short_units, policy

    def _revoke(self, row: UnitRow, now_s: float, why: str, *, may_sleep: bool = False) -> None:
        grace_s = self._settings.grace_s
        self.table.revoke(row.unit, row.epoch, now_s, grace_s=grace_s, why=why, may_sleep=may_sleep)

    def _rows_of(self, policy: str) -> list[UnitRow]:
        return [row for row in self.table.rows.values() if row.policy == policy and row.state in OWNED]

    def _starting_s(self, now_s: float) -> dict[str, float]:
        """Return policy -> age of its oldest grant whose engine has not spoken yet."""
        waiting = [row for row in self.table.rows.values() if row.state is UnitState.GRANTED]
        return {row.policy: now_s - row.renewed_s for row in sorted(waiting, key=lambda row: -row.renewed_s)}

    def _usable(self) -> dict[str, Counter[str]]:
        """Return the units that a policy's engine fits, by type. A dead unit does not count."""
        found = {policy: Counter(dict.fromkeys(sorted(map(self.types.__getitem__, units)), 0))
                 for policy, units in self._fits.items()}  # fmt: skip
        for policy, units in self._fits.items():
            found[policy].update(
                self.types[unit] for unit in units if self.table.rows[unit].state is not UnitState.DEAD
            )
        return found

    def _held(self) -> dict[str, Counter[str]]:
        """Return the units that each policy owns now, by type."""
        return {policy: Counter(self.types[row.unit] for row in self._rows_of(policy)) for policy in self._fits}

    def _target(self, policy: str, kind: str) -> int:
        return self.targets.get(policy, {}).get(kind, 0)

    def _share(self, policy: str, held: Counter[str]) -> UnitShare:
        kinds = sorted(
            {self.types[unit] for unit in self._fits[policy]} - {ONLY_TYPE}
        )  # a host may not have spoken yet
        by_type = {
            kind: TypeShare(self._target(policy, kind), held[kind], self.rule.tokens_per_s(policy, kind))
            for kind in kinds
        }
        return UnitShare(
            policy=policy,
            target_units=sum(self.targets.get(policy, {}).values()),
            held_units=held.total(),
            demand_units=self.rule.demand_units(policy),
            progress=self.rule.progress(policy),
            num_reports=self.rule.num_reports(policy),
            by_type=by_type if len(kinds) > 1 else {},
        )

    def _notice_gap(self, now_s: float) -> None:
        """Do not count the silence of a time in which this process itself stood still."""
        gap_s = now_s - self._now_s
        if gap_s > self._settings.ttl_s / 2:
            self.table.forgive(gap_s)
            self._unserved.forgive(gap_s)
        self._now_s = max(self._now_s, now_s)
