"""The allocator of slots: leases from requests of workers and reports of learners. No socket, clock or file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from mrl.allocation.allocation_limits import MAX_TOLD_EPOCH
from mrl.allocation.decision import DecisionRecord
from mrl.allocation.meter import increments
from mrl.allocation.objective import SLOTS, Rule
from mrl.allocation.proportional import split_evenly
from mrl.allocation.slot_controller import SlotController
from mrl.allocation.slot_leases import HolderLeases, SlotLeases
from mrl.errors import ConfigError
from mrl.records.leases import (
    AllocatorReply,
    AllocatorRequest,
    LearnerReport,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    ReportAck,
)


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """Settings of the allocator of slots."""

    slots: int
    """Requests that may run at once, over all policies."""
    floor_slots: int
    """Least share of a policy with a live holder."""
    ttl_s: float
    """Seconds that a lease lives without a renewal."""
    silent_s: float = 120.0
    """Seconds of silence after which a learner's policy can use no slot."""
    rule: Rule = SLOTS
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    """Policy -> answers per group, by default 1: shares are whole groups."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Policy -> priority, by default 1."""


@dataclass(frozen=True, slots=True)
class SlotShare:
    """The slots of one policy after a tick."""

    policy: str
    slots: int
    """Target of the policy; leases follow it as soon as other leases have shrunk."""
    held_slots: int
    """The most slots that the policy's holders can be using now."""
    demand_slots: float
    """Slots that would just keep the policy's learner busy; 0 while unknown, and when the learner is silent."""
    progress: float
    """Busy share of the policy's learner."""
    epoch: int
    moved_slots: int
    """Change of the target since the last tick."""
    num_reports: int
    supply_progress: float = 0.0
    """Share of the learner that the policy's engines fed, over the rule's window."""
    trained_share: float = 1.0
    """Share of the policy's generated groups that are trained on."""


class SlotCore:
    """The allocator of slots: shares `settings.slots` between `policies`.

    settling: an earlier allocator may have granted leases. For one ttl leases are only confirmed.
    """

    def __init__(
        self, policies: Sequence[str], settings: SlotSettings, now_s: float, *, settling: bool = False
    ) -> None:
        """Raises ConfigError when there are fewer slots than policies."""
        if settings.slots < len(policies):
            raise ConfigError(
                f"too few slots for {len(policies)} policies",
                where="allocation.slots",
                got=settings.slots,
                wanted=f"at least {len(policies)}",
                cure="raise allocation.slots",
            )
        self.epoch = 1
        """Epoch of the newest lease."""
        self._settings = settings
        self._shares = SlotController(
            policies,
            settings.rule,
            slots=settings.slots,
            floor_slots=settings.floor_slots,
            silent_s=settings.silent_s,
            group_sizes=settings.group_sizes,
            weights=settings.weights,
            now_s=now_s,
        )
        self._policies = tuple(policies)
        self._leases = SlotLeases(settings.ttl_s)
        self._started_s = self._now_s = now_s
        self._settled_s = now_s + settings.ttl_s if settling else now_s
        self._seen: set[str] = set()
        self._told: dict[str, int] = dict.fromkeys(policies, 0)
        self._decide(now_s)

    @property
    def record(self) -> DecisionRecord:
        """The newest decision with its inputs."""
        assert self._shares.record is not None, "the first decision is made at once"
        return self._shares.record

    @property
    def bound(self) -> float:
        """The highest least progress that the demands of the newest decision allow, floors left out."""
        demands = sum(reading.demand_units for reading in self.record.readings)
        return min(1.0, self._settings.slots / demands) if demands else 1.0

    def handle(self, message: AllocatorRequest, now_s: float) -> list[tuple[str, AllocatorReply]]:
        """Handle one message; return (holder or policy, reply). A policy that the run does not have gets no answer."""
        self._notice_gap(now_s)
        if message.policy not in self._policies:
            return []
        if isinstance(message, LearnerReport):
            self._shares.add_learner(message, now_s)
            self._decide(now_s)
            return [(message.policy, ReportAck(policy=message.policy))]
        if isinstance(message, LeaseReturn):
            self._leases.give_back(message.holder)
            self._decide(now_s)
            return []
        return [(message.holder, self._renew(message, now_s))]

    def tick(self, now_s: float) -> list[SlotShare]:
        """Drop silent holders and decide anew; return the share of every policy. Call this more often than ttl / 2."""
        self._notice_gap(now_s)
        self._leases.expire(now_s)
        self._decide(now_s)
        shares = [self._share(policy) for policy in self._policies]
        self._told = dict(self._shares.targets)
        return shares

    def _renew(self, request: LeaseRequest, now_s: float) -> LeaseGrant:
        self._seen.add(request.policy)
        request = self._within_bounds(request)
        # A restarted allocator counts on from the epochs of its predecessor, which workers tell.
        self.epoch = max(self.epoch, request.epoch, request.newest_epoch)
        before = self._leases.holders.get(request.holder)
        old_totals = before.totals if before else None
        holder = self._leases.renew(request, now_s)
        if old_totals is not None:
            totals = (float(request.generated_tokens), request.slot_seconds)
            tokens, slot_seconds = increments(totals, old_totals)
            peak_slots = max(holder.peak_slots, holder.held_slots)
            self._shares.add_worker(request.policy, tokens, slot_seconds, peak_slots)
            holder.totals = totals
            holder.peak_slots = holder.held_slots if slot_seconds else peak_slots
        self._decide(now_s)
        epoch, slots = self._lease(request.holder, holder, now_s)
        return LeaseGrant(
            holder=request.holder,
            policy=request.policy,
            slots=slots,
            epoch=epoch,
            ttl_s=self._settings.ttl_s,
            sequence=request.sequence,
        )

    def _within_bounds(self, request: LeaseRequest) -> LeaseRequest:
        """Return the request, cut to epochs and slots that a worker can have: a lie must not use up later epochs."""
        return msgspec.structs.replace(
            request,
            epoch=min(request.epoch, MAX_TOLD_EPOCH),
            newest_epoch=min(request.newest_epoch, MAX_TOLD_EPOCH),
            slots=min(request.slots, self._settings.slots),
        )

    def _lease(self, name: str, holder: HolderLeases, now_s: float) -> tuple[int, int]:
        """Return the lease (epoch, slots) that a holder gets now: its target, as far as other leases have made room."""
        wanted = self._wanted(name, holder, now_s)
        room = max(0, self._settings.slots - self._leases.held_slots())
        slots = min(wanted, holder.held_slots + room)
        # The same lease again, unless the holder has heard of a newer one of an earlier allocator and would ignore it.
        if holder.newest and holder.newest[1] == slots and holder.newest[0] >= holder.heard_epoch:
            return holder.newest
        self.epoch += 1
        holder.leases.append((self.epoch, slots))
        return self.epoch, slots

    def _wanted(self, name: str, holder: HolderLeases, now_s: float) -> int:
        if now_s < self._settled_s:
            return holder.newest[1] if holder.newest else 0
        names, group = self._leases.holders_of(holder.policy), self._settings.group_sizes.get(holder.policy, 1)
        groups = split_evenly(self._shares.targets[holder.policy] // group, len(names))
        return groups[names.index(name)] * group

    def _decide(self, now_s: float) -> None:
        """Decide where a period has passed, or a policy came or went."""
        holders = {policy: self._num_holders(policy, now_s) for policy in self._policies}
        if self._shares.is_due(now_s, holders):
            self._shares.decide(now_s, holders)

    def _num_holders(self, policy: str, now_s: float) -> int:
        """Return the number of a policy's workers; a first worker that may still be starting counts as one."""
        starting = policy not in self._seen and now_s - self._started_s <= self._settings.ttl_s
        return len(self._leases.holders_of(policy)) or int(starting)

    def _share(self, policy: str) -> SlotShare:
        meter, holders = self._shares.meters[policy], self._leases.holders_of(policy)
        slots = self._shares.targets[policy]
        return SlotShare(
            policy=policy,
            slots=slots,
            held_slots=sum(self._leases.holders[holder].held_slots for holder in holders),
            demand_slots=self._shares.demand_slots(policy),
            progress=meter.progress(),
            epoch=self.epoch,
            moved_slots=abs(slots - self._told[policy]),
            num_reports=self._shares.num_reports[policy],
            supply_progress=self.record.progress[policy],
            trained_share=meter.trained_share(),
        )

    def _notice_gap(self, now_s: float) -> None:
        """Do not count the silence of a time in which this process itself stood still."""
        gap_s = now_s - self._now_s
        if gap_s > self._settings.ttl_s / 2:
            self._leases.forgive(gap_s)
        self._now_s = max(self._now_s, now_s)
