"""The record of who may be using what, told from grants sent and epochs that holders say they act under."""

from dataclasses import dataclass, field

from mrl.records.leases import LeaseRequest


@dataclass
class Holding:
    """One holder and the leases that it may be acting under."""

    policy: str
    seen_s: float
    totals: tuple[float, ...]
    leases: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, slots), oldest first: the one that the holder acts under and those sent since."""
    heard_epoch: int = 0
    """Of the newest lease that the holder has heard of, perhaps of an earlier allocator: it takes no older one."""

    @property
    def held_slots(self) -> int:
        """The most that the holder can have running: any of these leases may be the one that it acts under."""
        return max((slots for _, slots in self.leases), default=0)

    @property
    def newest(self) -> tuple[int, int] | None:
        """The lease sent last."""
        return self.leases[-1] if self.leases else None


class LeaseLedger:
    """All holders of a run."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.holdings: dict[str, Holding] = {}

    def renew(self, request: LeaseRequest, now_s: float) -> Holding:
        """Note that a holder is there and what it acts under; forgets the leases that came before that."""
        totals = (float(request.generated_tokens), request.slot_seconds)
        holding = self.holdings.setdefault(request.holder, Holding(request.policy, now_s, totals))
        holding.policy, holding.seen_s, holding.heard_epoch = request.policy, now_s, request.newest_epoch
        # The holder's own word also stands for a lease of an earlier allocator, or one that ran out here meanwhile.
        acting = [(request.epoch, request.slots)] if request.epoch else []
        holding.leases = acting + [lease for lease in holding.leases if lease[0] > request.epoch]
        return holding

    def expire(self, now_s: float) -> list[str]:
        """Forget holders that were silent for longer than the ttl; returns their names."""
        gone = [name for name, holding in self.holdings.items() if now_s - holding.seen_s > self._ttl_s]
        for name in gone:
            del self.holdings[name]
        return gone

    def give_back(self, holder: str) -> None:
        """A holder runs nothing any more and says so."""
        self.holdings.pop(holder, None)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` as silence: the allocator itself was not there to listen."""
        for holding in self.holdings.values():
            holding.seen_s += gap_s

    def held_slots(self) -> int:
        """The most that all holders together can have running."""
        return sum(holding.held_slots for holding in self.holdings.values())

    def holders_of(self, policy: str) -> list[str]:
        """Live holders of a policy, by name."""
        return sorted(name for name, holding in self.holdings.items() if holding.policy == policy)
