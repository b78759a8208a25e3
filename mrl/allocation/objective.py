"""The objective that the solver maximises: the worth of a share to the pool, one policy at a time.

Max-min progress is reached in the long run, not in each decision. The worth of a policy falls off exponentially with
its progress so far, so that the policy furthest behind gains most from one more unit (a gradient scheduler of a concave
potential). The price of switching is inside: a replica that has to be started serves for less than the hold horizon.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from mrl.allocation.allocation_limits import MAX_DEMAND_UNITS, MIN_DEMAND_REPLICAS, MIN_DEMAND_UNITS
from mrl.allocation.solver import FloatArray

Objective = Literal["max_min", "weighted", "throughput", "static"]

BELOW_FLOOR = -1e9
"""Worth of a share below the floor. A share that keeps the floor is worth half of this at least."""
IDLE_UNIT_COST = 1e-6
"""Worth that an idle unit costs: of equal splits the split with fewer units wins."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the controller; the defaults suit GPUs that take half a minute to switch to another policy."""

    objective: Objective = "max_min"
    """The quantity to raise: least progress, least progress per weight, trained tokens per second over all policies; or
    a fixed split."""
    period_s: float = 60.0
    """Seconds between two decisions."""
    hold_s: float = 600.0
    """Horizon in seconds over which a share is valued (T)."""
    window_s: float = 4800.0
    """Time constant in seconds of the progress made so far (W); at least four times `hold_s`."""
    dwell_s: float = 600.0
    """Least seconds between two moves."""
    min_gain: float = 0.02
    """A move has to raise the worth by this share (delta)."""
    sharpness: float = 20.0
    """How fast worth falls with progress (k): the higher, the nearer to max-min."""
    price: float = 0.03
    """Price, in progress, of capacity for one whole demand; it leaves units beyond the demand free."""
    smoothness: float = 12.0
    """Exponent of the smooth min(1, x) that turns supply into progress."""
    max_unserved_s: float = 1200.0
    """Seconds unserved after which a policy gets a replica, in a pool too small for one replica of each policy."""


SLOTS = Rule(period_s=2.0, hold_s=10.0, window_s=60.0, dwell_s=5.0)
"""Rule for slots of running engines, which move within a fraction of a second."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The knowledge about one policy at a decision. Tuples have one entry per type of unit."""

    policy: str
    replicas: tuple[int, ...]
    """Replicas that the policy has at the decision."""
    progress_per_replica: tuple[float, ...] | None
    """Share of the policy's learner that one replica feeds: units per replica / demand. 0 where its engine cannot run;
    None: unknown."""
    supply_progress: float | None
    """Share of the policy's learner that was fed since the last decision; None when that cannot be told."""
    unfit: tuple[bool, ...] = ()
    """For each type whether the policy's engine does not fit it; empty where it fits all."""
    units_per_replica: int = 1
    floor_replicas: int = 1
    silent: bool = False
    """Whether the policy's learner hangs, or the policy has no worker; it then gets no unit."""
    switch_s: float = 0.0
    """Seconds from the grant of a replica until it serves."""
    weight: float = 1.0
    """Priority, 1 being the highest of the run; with the objective "static" the policy's part of the units."""
    learner_tokens_per_s: float = 0.0
    """Tokens that the policy's learner trains per busy second; counts in the objective "throughput" only."""

    @property
    def demand_units(self) -> float:
        """Units of the policy's best type that just keep its learner busy; 0 while unknown or silent."""
        best = max(self.progress_per_replica or (0.0,))
        return self.units_per_replica / best if best > 0.0 and not self.silent else 0.0


def share_worth(
    reading: Reading, counts_NK: NDArray[np.int64], rule: Rule, *, progress: float, reference: float
) -> FloatArray:
    """Return the worth of N candidate shares of one policy.

    counts_NK: replicas per unit type of each candidate.
    progress: progress of the policy so far, over the rule's window.
    reference: the least weighted progress of all policies; a scale that is the same for every policy.
    """
    total_N: NDArray[np.int64] = counts_NK.sum(axis=1)
    if reading.silent or reading.progress_per_replica is None:
        return (-IDLE_UNIT_COST * reading.units_per_replica * total_N).astype(np.float64)
    serves_K = np.array(reading.progress_per_replica) > 0.0
    least_K = serves_K * (reading.units_per_replica / MAX_DEMAND_UNITS)
    per_replica_K = np.clip(reading.progress_per_replica, least_K, 1.0 / MIN_DEMAND_REPLICAS)
    started_NK = np.maximum(counts_NK - np.array(reading.replicas), 0)
    serving_NK = np.maximum(counts_NK - started_NK * (reading.switch_s / rule.hold_s), 0.0)
    supply_N: FloatArray = (serving_NK @ per_replica_K).astype(np.float64)
    price_N = rule.price * (counts_NK @ per_replica_K)
    fed_N: FloatArray = _smooth_min_one(supply_N, rule.smoothness) - price_N
    if rule.objective == "throughput":
        worth_N: FloatArray = fed_N * reading.learner_tokens_per_s
    else:
        weight = reading.weight if rule.objective == "weighted" else 1.0
        later_N = progress + (1.0 - np.exp(-rule.hold_s / rule.window_s)) * (fed_N - progress)
        scale = min(max(reading.demand_units, MIN_DEMAND_UNITS), MAX_DEMAND_UNITS) * weight / rule.sharpness
        worth_N = -scale * np.exp(-rule.sharpness * (later_N / weight - reference))
    worth_N = np.maximum(worth_N, BELOW_FLOOR / 2)
    worth_N[counts_NK @ serves_K < reading.floor_replicas] = BELOW_FLOOR
    # A replica on a type where it makes nothing costs a little, or the search would leave it there for nothing.
    worth_N -= IDLE_UNIT_COST * reading.units_per_replica * (counts_NK @ ~serves_K)
    return worth_N


def _smooth_min_one(x: FloatArray, smoothness: float) -> FloatArray:
    """Return min(1, x) without its corner; for large x computed from 1 / x, which cannot overflow."""
    small, large = np.minimum(x, 1.0), np.maximum(x, 1.0)
    below: FloatArray = small / (1.0 + small**smoothness) ** (1.0 / smoothness)
    above: FloatArray = 1.0 / (1.0 + large**-smoothness) ** (1.0 / smoothness)
    return np.where(x <= 1.0, below, above)
