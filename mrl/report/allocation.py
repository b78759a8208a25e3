"""Shares of the rollout capacity and their last move, reduced from the allocator's metrics without a clock.

The age of a move is measured by the allocator's own clock up to its newest record, and by arrival from then on. So the
age is right on another host, and after the metrics of an earlier attempt were read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mrl.metrics.names import IDLE_SHARE
from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.number_format import count, percent, seconds

BEGUN, ENDED = "allocation/begun_leases", "allocation/ended_leases/"
HELD_TYPE = "allocation/held_units/"
BECAUSE = "allocation/moves_because/"
ONE_DECISION_S = 0.5
"""Seconds within which changes of several policies' slots belong to one move."""


@dataclass(slots=True)
class Move:
    """Slots, or a unit, that went from policies to others; a unit may not have a new policy yet."""

    at_unix_s: float
    why: str
    changes: list[tuple[str, float]] = field(default_factory=list)
    """(policy, slots or units gained), negative where lost."""

    @property
    def is_one_sided(self) -> bool:
        """Whether several policies all gained or all lost: nothing moved between them."""
        return len(self.changes) > 1 and len({gained < 0 for _, gained in self.changes}) == 1


class Allocation:
    """Shares of capacity, idle time of units, and the newest move."""

    def __init__(self) -> None:
        self.kind: Literal["slots", "units"] = "slots"
        self.shares: dict[str, float] = {}
        """Policy -> slots granted, or units owned; empty before the first record of the allocator."""
        self.by_type: dict[str, dict[str, float]] = {}
        """Policy -> type of unit -> units owned, where there are several types."""
        self.idle: dict[str, float] = {}
        """Metric of a unit -> share of the time since its last record in which the unit did nothing."""
        self.move: Move | None = None
        """Newest move."""
        self._before: dict[str, Mapping[str, float]] = {}
        self._told_unix_s = self._heard_s = 0.0

    def take(self, record: MetricsRecord, now_s: float) -> None:
        """Take in one record of the allocator that arrived at `now_s`; a record of another role changes nothing."""
        self.idle |= {name: share for name, share in record.values.items() if name.startswith(IDLE_SHARE)}
        if "allocation/held_units" in record.values:
            self.kind = "units"
            self._take_units(record)
        elif "allocation/slots" in record.values:
            self.kind = "slots"
            self._take_slots(record)
        else:
            return
        self._told_unix_s, self._heard_s = record.time_unix_s, now_s
        self._before[record.policy] = record.values

    def line(self, now_s: float) -> str:
        """Return one line; empty before the first record of the allocator.

        Example: `units qwen 2 llama 6, idle 4% | last move qwen -> llama 12s ago: another policy needs it more`.
        With several types of units: `units qwen 2 H100 llama 1 H100 + 5 A10`.
        """
        if not self.shares:
            return ""
        shares = " ".join(f"{policy} {self._share_text(policy)}" for policy in self.shares)
        idle = f", idle {percent(sum(self.idle.values()) / len(self.idle))}" if self.idle else ""
        return f"{self.kind} {shares}{idle}{self._move_text(now_s)}"

    def _share_text(self, policy: str) -> str:
        parts = [f"{count(held)} {kind}" for kind, held in self.by_type.get(policy, {}).items() if held]
        return " + ".join(parts) or count(self.shares[policy])

    def _take_units(self, record: MetricsRecord) -> None:
        policy, values = record.policy, record.values
        before = self._before.get(policy, values)
        self.shares[policy] = values["allocation/held_units"]
        self.by_type[policy] = {
            name.removeprefix(HELD_TYPE): held for name, held in values.items() if name.startswith(HELD_TYPE)
        }
        for name, number in values.items():
            if name.startswith(ENDED) and number > before.get(name, 0.0):
                self.move = Move(record.time_unix_s, name.removeprefix(ENDED), [(policy, -1.0)])
        is_begun = values.get(BEGUN, 0.0) > before.get(BEGUN, 0.0)
        if is_begun and self.move and len(self.move.changes) == 1:
            self.move.changes.append((policy, 1.0))

    def _take_slots(self, record: MetricsRecord) -> None:
        policy, slots = record.policy, record.values["allocation/slots"]
        gained = slots - self.shares.get(policy, slots)
        self.shares[policy] = slots
        why = next((name.removeprefix(BECAUSE) for name in record.values if name.startswith(BECAUSE)), "")
        if not gained or not why:
            return
        if self.move is None or self._is_another(self.move, record):
            self.move = Move(record.time_unix_s, why)
        self.move.changes.append((policy, gained))

    def _is_another(self, move: Move, record: MetricsRecord) -> bool:
        is_told = any(policy == record.policy for policy, _ in move.changes)
        return is_told or record.time_unix_s - move.at_unix_s > ONE_DECISION_S

    def _move_text(self, now_s: float) -> str:
        if self.move is None or self.move.is_one_sided:
            return ""
        if self.kind == "units":
            giver, *taker = (policy for policy, _ in self.move.changes)
            what = f"{giver} -> {taker[0] if taker else '...'}"
        else:
            what = " ".join(f"{policy} {gained:+.0f}" for policy, gained in self.move.changes)
        age_s = max(0.0, self._told_unix_s - self.move.at_unix_s + now_s - self._heard_s)
        return f" | last move {what} {seconds(age_s)} ago: {self.move.why.replace('_', ' ')}"
