"""What the allocator decides, with no socket, clock or file in sight."""

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.allocation.ledger import Holding, LeaseLedger
from mrl.allocation.meter import PolicyMeter, increments
from mrl.allocation.shares import fair_shares, progress_gain, split_evenly
from mrl.errors import ConfigError
from mrl.records.leases import AllocatorReply, AllocatorRequest, LearnerReport, LeaseGrant, LeaseRequest, ReportAck


@dataclass(frozen=True, slots=True)
class AllocationSettings:
    """The numbers of the rule."""

    slots: int
    """Requests that may run at once, over all policies."""
    floor_slots: int
    """Least share of a policy with a live holder."""
    ttl_s: float
    """Life of a lease that is not renewed."""
    dwell_s: float = 5.0
    """Least time between two moves."""
    min_gain: float = 0.02
    """A move has to raise the least progress by this share, or nothing moves."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What one policy has after a tick."""

    policy: str
    slots: int
    """Its target; leases follow it as soon as others have shrunk."""
    held_slots: int
    """The most that its holders can have running now."""
    demand_slots: float
    """Slots that would just keep its learner busy; 0 while unknown or when the learner is silent."""
    progress: float
    """Busy share of its learner."""
    epoch: int
    moved_slots: int
    """By how much the target changed since the last tick."""
    num_holders: int
    num_reports: int


class AllocatorCore:
    """Shares `settings.slots` between `policies`.

    `settling` says that an earlier allocator may have granted leases: for one ttl, leases are only confirmed.
    """

    def __init__(
        self, policies: Sequence[str], settings: AllocationSettings, now_s: float, *, settling: bool = False
    ) -> None:
        """Raises ConfigError when there are fewer slots than policies."""
        if settings.slots < len(policies):
            raise ConfigError(
                f"{len(policies)} policies cannot share these slots",
                where="allocation.slots",
                got=settings.slots,
                wanted=f"at least {len(policies)}",
                cure="raise allocation.slots",
            )
        self.epoch = 1
        """Epoch of the newest lease."""
        self.num_unknown = 0
        """Messages refused because they came from a policy that the run does not have."""
        self._settings = settings
        self._meters = {policy: PolicyMeter() for policy in policies}
        self._ledger = LeaseLedger(settings.ttl_s)
        self._started_s = self._now_s = now_s
        self._settled_s = now_s + settings.ttl_s if settling else now_s
        self._moved_s = now_s
        self._seen: set[str] = set()
        self._live: frozenset[str] = frozenset()
        self._targets: dict[str, int] = dict.fromkeys(policies, 0)
        self._told: dict[str, int] = dict(self._targets)
        self._decide(now_s)

    def handle(self, message: AllocatorRequest, now_s: float) -> list[tuple[str, AllocatorReply]]:
        """Answer one message: (holder or policy, reply). A policy that the run does not have gets no answer."""
        self._notice_gap(now_s)
        if message.policy not in self._meters:
            self.num_unknown += 1
            return []
        if isinstance(message, LearnerReport):
            meter = self._meters[message.policy]
            meter.add_report(message.trained_tokens, message.busy_s, message.data_wait_s, now_s)
            return [(message.policy, ReportAck(policy=message.policy))]
        return [(message.holder, self._renew(message, now_s))]

    def tick(self, now_s: float) -> list[Decision]:
        """Drop silent holders, decide anew, and say what every policy has. To be called more often than ttl / 2."""
        self._notice_gap(now_s)
        self._ledger.expire(now_s)
        self._decide(now_s)
        decisions = [self._decision(policy, now_s) for policy in self._meters]
        self._told = dict(self._targets)
        return decisions

    def _renew(self, request: LeaseRequest, now_s: float) -> LeaseGrant:
        self._seen.add(request.policy)
        self.epoch = max(self.epoch, request.epoch)
        before = self._ledger.holdings.get(request.holder)
        old_totals = before.totals if before else None
        holding = self._ledger.renew(request, now_s)
        if old_totals is not None:
            totals = (float(request.generated_tokens), request.slot_seconds)
            tokens, slot_seconds = increments(totals, old_totals)
            self._meters[request.policy].add_rollout(tokens, slot_seconds, holding.held_slots)
            holding.totals = totals
        self._decide(now_s)
        epoch, slots = self._lease(request.holder, holding, now_s)
        return LeaseGrant(
            holder=request.holder,
            policy=request.policy,
            slots=slots,
            epoch=epoch,
            ttl_s=self._settings.ttl_s,
            sequence=request.sequence,
        )

    def _lease(self, holder: str, holding: Holding, now_s: float) -> tuple[int, int]:
        """The lease that a holder gets now: its target, as far as others have made room for it."""
        wanted = self._wanted(holder, holding, now_s)
        room = max(0, self._settings.slots - self._ledger.held_slots())
        slots = min(wanted, holding.held_slots + room)
        if holding.newest and holding.newest[1] == slots:
            return holding.newest
        self.epoch += 1
        holding.leases.append((self.epoch, slots))
        return self.epoch, slots

    def _wanted(self, holder: str, holding: Holding, now_s: float) -> int:
        if now_s < self._settled_s:
            return holding.newest[1] if holding.newest else 0
        holders = self._ledger.holders_of(holding.policy)
        return split_evenly(self._targets[holding.policy], len(holders))[holders.index(holder)]

    def _decide(self, now_s: float) -> None:
        """Move the targets where a policy came or went, or where it pays."""
        live = frozenset(policy for policy in self._meters if self._is_live(policy, now_s))
        demands = self._demands(live, now_s)
        settings = self._settings
        new = fair_shares(demands, slots=settings.slots, floor_slots=settings.floor_slots)
        if live == self._live:
            pays = progress_gain(demands, new, self._targets) >= settings.min_gain
            if not pays or now_s - self._moved_s < settings.dwell_s:
                return
        self._live, self._moved_s = live, now_s
        self._targets = {policy: new.get(policy, 0) for policy in self._meters}

    def _is_live(self, policy: str, now_s: float) -> bool:
        """A policy with a holder, or one that was never seen and may still be starting."""
        starting = policy not in self._seen and now_s - self._started_s <= self._settings.ttl_s
        return starting or bool(self._ledger.holders_of(policy))

    def _demands(self, live: frozenset[str], now_s: float) -> dict[str, float]:
        """Demand of every live policy, in slots; an unknown one is taken for the mean of the known."""
        measured = {policy: self._meters[policy].demand_slots(now_s) for policy in sorted(live)}
        known = [demand for demand in measured.values() if demand]
        mean = sum(known) / len(known) if known else 1.0
        return {policy: mean if demand is None else demand for policy, demand in measured.items()}

    def _decision(self, policy: str, now_s: float) -> Decision:
        meter, holders = self._meters[policy], self._ledger.holders_of(policy)
        return Decision(
            policy=policy,
            slots=self._targets[policy],
            held_slots=sum(self._ledger.holdings[holder].held_slots for holder in holders),
            demand_slots=meter.demand_slots(now_s) or 0.0,
            progress=meter.progress(),
            epoch=self.epoch,
            moved_slots=abs(self._targets[policy] - self._told[policy]),
            num_holders=len(holders),
            num_reports=meter.num_reports,
        )

    def _notice_gap(self, now_s: float) -> None:
        """Silence while this process itself was stopped is nobody's silence."""
        gap_s = now_s - self._now_s
        if gap_s > self._settings.ttl_s / 2:
            self._ledger.forgive(gap_s)
        self._now_s = max(self._now_s, now_s)
