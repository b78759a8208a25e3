"""The clairvoyant optimum, a bound that no allocation rule can beat. It shares no code with the controller.

Time averages of units held and progress made are feasible for the linear programme, whatever a rule does: a replica
makes at most its full rate, a learner is busy at most all the time. Gangs, switching, drops and pauses only cost.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from allocation_simulation.settings import Scenario

PIECE_S = 300.0


class Bound(NamedTuple):
    """Optima of one scenario."""

    least_progress: float
    """Highest least progress over the whole time, the future being known."""
    myopic: float
    """Highest least progress when each piece of time is optimised by itself, without knowledge of the others."""


class _Piece(NamedTuple):
    length_s: float
    units: int
    demand_N: NDArray[np.float64]
    live_N: NDArray[np.float64]


def bound(scenario: Scenario) -> Bound:
    """Return the optima of a scenario over the time after its warm-up."""
    pieces = _pieces(scenario)
    live_s_N = np.sum([piece.length_s * piece.live_N for piece in pieces], axis=0)
    alone = [_least_progress([piece], piece.length_s * piece.live_N) for piece in pieces]
    fed_s_N = np.sum([piece.length_s * fed_N for piece, (_, fed_N) in zip(pieces, alone, strict=True)], axis=0)
    return Bound(_least_progress(pieces, live_s_N)[0], float(np.min(fed_s_N / live_s_N)))


def _pieces(scenario: Scenario) -> list[_Piece]:
    """Cut the time after the warm-up where the world changes, ramps every five minutes.

    Each piece has the demands and the live learners of its middle.
    """
    edges = {scenario.warmup_s, scenario.horizon_s, *scenario.edges_s()}
    for begin_s, end_s, _ in scenario.growth.values():
        edges.update(np.arange(begin_s, end_s, PIECE_S).tolist())
    inside = sorted(edge for edge in edges if scenario.warmup_s <= edge <= scenario.horizon_s)
    found = []
    for begin_s, end_s in pairwise(inside):
        middle_s = (begin_s + end_s) / 2
        demand = [one.demand_units(scenario.multiplier(one.name, middle_s)) for one in scenario.policies]
        live = [0.0 if scenario.hangs_at(one.name, middle_s) else 1.0 for one in scenario.policies]
        found.append(_Piece(end_s - begin_s, scenario.units_up(middle_s), np.array(demand), np.array(live)))
    return found


def _capacity(pieces: list[_Piece]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[P, N * P + 1] rows and [P] limits that hold the units of every piece.

    A column each for u_ip, piece by piece, and a last one for the least progress.
    """
    num = len(pieces[0].demand_N)
    rows = np.zeros((len(pieces), num * len(pieces) + 1))
    for index, piece in enumerate(pieces):
        rows[index, index * num : (index + 1) * num] = piece.demand_N * piece.live_N
    return rows, np.array([piece.units for piece in pieces], dtype=float)


def _fed(pieces: list[_Piece], live_s_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, N * P] rows that turn u_ip into the progress of every policy."""
    num = len(live_s_N)
    share_PN = np.array([piece.length_s * piece.live_N for piece in pieces]) / np.maximum(live_s_N, 1e-12)
    return np.concatenate([np.diag(share_N) for share_N in share_PN], axis=1).reshape(num, -1)


def _least_progress(pieces: list[_Piece], live_s_N: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the max-min progress, and [N] the progress of every policy where its sum is highest beside that."""
    capacity, units = _capacity(pieces)
    fed = _fed(pieces, live_s_N)
    counted = live_s_N > 0.0
    fair = np.concatenate([-fed, np.ones((len(live_s_N), 1))], axis=1)[counted]
    rows, limits = np.concatenate([capacity, fair]), np.concatenate([units, np.zeros(int(counted.sum()))])
    cost = np.zeros(rows.shape[1])
    cost[-1] = -1.0
    first = linprog(cost, A_ub=rows, b_ub=limits, bounds=(0.0, 1.0), method="highs")
    theta = float(-first.fun)
    cost[:-1], cost[-1] = -fed.sum(axis=0), 0.0
    low = [(0.0, 1.0)] * (len(cost) - 1) + [(theta - 1e-9, 1.0)]
    second = linprog(cost, A_ub=rows, b_ub=limits, bounds=low, method="highs")
    return theta, fed @ second.x[:-1]
