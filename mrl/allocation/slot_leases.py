"""Leases of slots: the slots that every holder may be using, from grants sent and epochs that holders tell."""

from dataclasses import dataclass, field

from mrl.records.leases import LeaseRequest


@dataclass
class HolderLeases:
    """The leases that one holder may be acting under."""

    policy: str
    seen_s: float
    totals: tuple[float, ...]
    leases: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, slots), oldest first: the lease that the holder acts under, and the leases sent since."""
    peak_slots: int = 0
    """The most slots that the holder can have used since it last told of work, which may have run on all of them."""
    heard_epoch: int = 0
    """Epoch of the newest lease that the holder heard of, perhaps from an earlier allocator; it ignores older ones."""

    @property
    def held_slots(self) -> int:
        """The most slots that the holder can be using: it may act under any of these leases."""
        return max((slots for _, slots in self.leases), default=0)

    @property
    def newest(self) -> tuple[int, int] | None:
        """The lease sent last."""
        return self.leases[-1] if self.leases else None


class SlotLeases:
    """The leases of all holders of a run."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.holders: dict[str, HolderLeases] = {}
        """Name of a holder -> its leases."""

    def renew(self, request: LeaseRequest, now_s: float) -> HolderLeases:
        """Note a holder's sign of life and the lease that it acts under; forget older leases.

        Returns the holder's leases.
        """
        totals = (float(request.generated_tokens), request.slot_seconds)
        leases = self.holders.setdefault(request.holder, HolderLeases(request.policy, now_s, totals))
        leases.policy, leases.seen_s, leases.heard_epoch = request.policy, now_s, request.newest_epoch
        # The holder's own word also stands for a lease of an earlier allocator, or one that ran out here meanwhile.
        acting = [(request.epoch, request.slots)] if request.epoch else []
        leases.leases = acting + [lease for lease in leases.leases if lease[0] > request.epoch]
        return leases

    def expire(self, now_s: float) -> None:
        """Forget holders that were silent for longer than the ttl."""
        for name in [name for name, leases in self.holders.items() if now_s - leases.seen_s > self._ttl_s]:
            del self.holders[name]

    def give_back(self, holder: str) -> None:
        """Forget a holder that says that it runs nothing any more."""
        self.holders.pop(holder, None)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` as silence: the allocator itself was not there to listen."""
        for leases in self.holders.values():
            leases.seen_s += gap_s

    def held_slots(self) -> int:
        """Return the most slots that all holders together can be using."""
        return sum(leases.held_slots for leases in self.holders.values())

    def holders_of(self, policy: str) -> list[str]:
        """Return the live holders of a policy, in the order of their names."""
        return sorted(name for name, leases in self.holders.items() if leases.policy == policy)
