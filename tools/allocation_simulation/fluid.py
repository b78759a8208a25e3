"""The controller in a world without engines: progress is what shares feed, at once. For sizes and unit types."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from mrl.allocation.decision import ControllerState, decide
from mrl.allocation.objective import Reading, Rule

SWITCH_S = 15.0
RULE = Rule()
HOURS = 8.0
TWO_TYPES = ((0.5,) * 4, (0.8, 0.65, 0.5, 0.35), (1.3, 0.9, 0.5, 0.4), (0.8, 0.65, 0.5, 0.0))
"""Rates of four policies on a second type of unit, relative to the first."""
SECOND_TYPE_RATES = (0.3, 1.2)
DEMANDS = (1.33, 3.58, 4.66, 6.94)
GANGS = (1, 1, 1, 2)


@dataclass(frozen=True)
class FluidOutcome:
    """What came of it."""

    ratio: float
    """Least progress over the optimum of the linear programme."""
    optimum: float
    decide_ms: float
    """Mean CPU time of a decision."""
    moves_per_unit_hour: float


def run_fluid(
    demands_NK: Sequence[tuple[float, ...]], gangs: list[int], capacity: tuple[int, ...], hours: float
) -> FluidOutcome:
    """Decisions once a minute; demand infinite where a policy cannot run on a type."""
    names = [f"p{index}" for index in range(len(gangs))]
    shares = {name: (0,) * len(capacity) for name in names}
    fed = dict.fromkeys(names, 0.5)
    state, progress, took_s, moved = ControllerState(decided_s=0.0), np.zeros(len(names)), 0.0, 0
    steps = int(hours * 60)
    for step in range(steps):
        readings = [
            Reading(
                policy=name,
                replicas=shares[name],
                progress_per_replica=tuple(gang / demand for demand in demands_K),
                supply_progress=fed[name],
                units_per_replica=gang,
                switch_s=SWITCH_S,
            )
            for name, gang, demands_K in zip(names, gangs, demands_NK, strict=True)
        ]
        began_s = time.process_time()
        state, record = decide(RULE, state, readings, capacity, 60.0 * step)
        took_s += time.process_time() - began_s
        if step and record.verdict == "moved":
            moved += record.moved_units
        shares = record.shares
        for index, reading in enumerate(readings):
            supply = np.dot(shares[reading.policy], reading.progress_per_replica or 0.0)
            fed[reading.policy] = min(1.0, float(supply))
            progress[index] += fed[reading.policy] / steps
    optimum = _optimum(demands_NK, capacity)
    return FluidOutcome(float(progress.min()) / optimum, optimum, 1e3 * took_s / steps, moved / sum(capacity) / hours)


def large_pool(num_policies: int, num_units: int, seed: int) -> FluidOutcome:
    """Policies with demands over two orders of magnitude that want a third more than there is."""
    rng = random.Random(seed)
    demands, gangs = _large_demands(num_policies, num_units, rng)
    return run_fluid([(demand,) for demand in demands], gangs, (num_units,), HOURS)


def large_pool_of_two_types(num_policies: int, num_units: int, seed: int) -> FluidOutcome:
    """The same with half of the units of a second type, on which each policy is slower or faster in its own way."""
    rng = random.Random(seed)
    demands, gangs = _large_demands(num_policies, num_units, rng)
    rates = [rng.uniform(*SECOND_TYPE_RATES) for _ in demands]
    pairs = [(demand, demand / rate) for demand, rate in zip(demands, rates, strict=True)]
    return run_fluid(pairs, gangs, (num_units // 2, num_units // 2), HOURS / 4)


def _large_demands(num_policies: int, num_units: int, rng: random.Random) -> tuple[list[float], list[int]]:
    raw = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(num_policies)]
    gangs = [rng.choice((1, 1, 2, 4)) for _ in raw]
    demands = [max(0.75 * gang, one * num_units / 0.75 / sum(raw)) for one, gang in zip(raw, gangs, strict=True)]
    return demands, gangs


def two_types(rates: tuple[float, ...]) -> FluidOutcome:
    """Eight units each of two types; `rates`: of every policy on the second type, relative to the first."""
    demands = [(demand, demand / rate if rate else math.inf) for demand, rate in zip(DEMANDS, rates, strict=True)]
    return run_fluid(demands, list(GANGS), (8, 8), HOURS)


def _optimum(demands_NK: Sequence[tuple[float, ...]], capacity: tuple[int, ...]) -> float:
    """max theta: theta <= sum_k a_ik / d_ik, the sum at most 1, sum_i a_ik <= G_k."""
    num, types = len(demands_NK), len(capacity)
    rows, limits = [], []
    for index, demands_K in enumerate(demands_NK):
        row = np.zeros(num * types + 1)
        row[index * types : (index + 1) * types] = [-1.0 / demand for demand in demands_K]
        row[-1] = 1.0
        rows.append(row)
        limits.append(0.0)
    for kind, units in enumerate(capacity):
        row = np.zeros(num * types + 1)
        row[kind:-1:types] = 1.0
        rows.append(row)
        limits.append(float(units))
    cost = np.zeros(num * types + 1)
    cost[-1] = -1.0
    bounds = [(0.0, None)] * (num * types) + [(0.0, 1.0)]
    return float(-linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=bounds, method="highs").fun)
