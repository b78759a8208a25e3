"""Units of two types in a closed loop: engines of set speed, learners that wait for them, and the rule of a run."""

import numpy as np
import pytest
from scipy.optimize import linprog

from mrl.allocation.engine_totals import EngineIncrement
from mrl.allocation.objective import Rule
from mrl.allocation.unit_controller import UnitController
from mrl.records.leases import LearnerReport

SWITCH_S, PERIOD_S = 1.0, 4.0
Speeds = dict[str, dict[str, float]]
"""Policy -> type -> tokens/s of an engine."""


class Loop:
    """A second at a time: engines make tokens into a buffer of some seconds, learners train while there are any."""

    def __init__(
        self, speeds: Speeds, trained_per_s: dict[str, float], units: dict[str, int], floor_units: int = 1
    ) -> None:
        self.speeds, self.trained_per_s, self.units = speeds, trained_per_s, units
        self.rule = UnitController(
            dict.fromkeys(speeds, "gpu"), {"gpu": sum(units.values())}, Rule(period_s=PERIOD_S),
            floor_units=floor_units,
            switching_share=0.1, hung_s=1e9, slots_per_unit=1, weights={}, now_s=0.0,
        )  # fmt: skip
        self.held: dict[str, dict[str, int]] = {policy: dict.fromkeys(units, 0) for policy in speeds}
        self.serving_from_s: dict[tuple[str, str], list[float]] = {}
        self.stock = dict.fromkeys(speeds, 0.0)
        self.busy_s = dict.fromkeys(speeds, 0.0)
        self.fewest_units = 10**9
        self.now_s = 0

    def run(self, seconds: int) -> dict[str, float]:
        """Busy share of every learner in this time."""
        before = dict(self.busy_s)
        for _ in range(seconds):
            self.second()
        return {policy: (self.busy_s[policy] - before[policy]) / seconds for policy in before}

    def second(self) -> None:
        self.now_s += 1
        for policy, types in self.held.items():
            for unit_type, count in types.items():
                self.make(policy, unit_type, count)
            self.train(policy)
        if self.now_s % PERIOD_S == 0:
            self.decide()

    def decide(self) -> None:
        usable = {
            policy: {kind: count for kind, count in self.units.items() if self.speeds[policy][kind]}
            for policy in self.held
        }
        self.held = self.rule.targets(usable, self.held, {}, float(self.now_s))
        assert all(
            self.speeds[policy][kind] for policy in self.held for kind, count in self.held[policy].items() if count
        )
        self.fewest_units = min(self.fewest_units, *(sum(types.values()) for types in self.held.values()))
        assert all(sum(types[kind] for types in self.held.values()) <= count for kind, count in self.units.items())

    def make(self, policy: str, unit_type: str, count: int) -> None:
        starts = self.serving_from_s.setdefault((policy, unit_type), [])
        while len(starts) < count:
            self.rule.add_switch(policy, SWITCH_S)
            starts.append(self.now_s + SWITCH_S)
        del starts[count:]
        for begins_s in starts:
            if begins_s <= self.now_s and self.stock[policy] < 4.0 * self.trained_per_s[policy]:
                self.stock[policy] += self.speeds[policy][unit_type]
                self.rule.add_rollout(policy, unit_type, EngineIncrement(self.speeds[policy][unit_type], 1.0))

    def train(self, policy: str) -> None:
        share = min(1.0, self.stock[policy] / self.trained_per_s[policy])
        self.stock[policy] -= share * self.trained_per_s[policy]
        self.busy_s[policy] += share
        self.rule.add_report(
            LearnerReport(
                policy=policy, trained_tokens=int(self.busy_s[policy] * self.trained_per_s[policy]),
                busy_s=self.busy_s[policy], data_wait_s=self.now_s - self.busy_s[policy],
            ),
            float(self.now_s),
        )  # fmt: skip


def optimum(speeds: Speeds, trained_per_s: dict[str, float], units: dict[str, int]) -> float:
    """max theta: theta <= 1, theta * trained tokens <= sum over types of units * speed, units of a type shared out."""
    policies, types = list(speeds), list(units)
    num_shares = len(policies) * len(types)
    fed = np.zeros((len(policies), num_shares + 1))
    shared = np.zeros((len(types), num_shares + 1))
    for row, policy in enumerate(policies):
        fed[row, -1] = trained_per_s[policy]
        for column, kind in enumerate(types):
            fed[row, row * len(types) + column] = -speeds[policy][kind]
            shared[column, row * len(types) + column] = 1.0
    objective = np.zeros(num_shares + 1)
    objective[-1] = -1.0
    found = linprog(
        objective, A_ub=np.vstack([fed, shared]), b_ub=[0.0] * len(policies) + list(units.values()),
        bounds=[(0.0, None)] * num_shares + [(0.0, 1.0)],
    )  # fmt: skip
    return float(-found.fun)


TRAINED_PER_S = {"a": 150.0, "b": 250.0, "c": 350.0}
EQUAL: Speeds = {policy: {"fast": 100.0, "slow": 50.0} for policy in "abc"}
UNEQUAL: Speeds = {
    "a": {"fast": 100.0, "slow": 95.0},
    "b": {"fast": 100.0, "slow": 60.0},
    "c": {"fast": 100.0, "slow": 20.0},
}
UNFIT: Speeds = {**UNEQUAL, "c": {"fast": 100.0, "slow": 0.0}}
"""An engine of c does not fit on slow units."""
REVERSED: Speeds = {**UNEQUAL, "a": {"fast": 60.0, "slow": 120.0}}


@pytest.mark.thorough
@pytest.mark.parametrize("speeds", [EQUAL, UNEQUAL, REVERSED, UNFIT])
def test_the_slowest_policy_comes_near_the_optimum_of_the_types(speeds: Speeds) -> None:
    units = {"fast": 4, "slow": 4}
    loop = Loop(speeds, TRAINED_PER_S, units)
    loop.run(200)
    ratio = min(loop.run(600).values()) / optimum(speeds, TRAINED_PER_S, units)
    assert 0.9 <= ratio <= 1.02


@pytest.mark.thorough
def test_a_type_that_is_too_small_for_all_is_measured_by_the_policies_whose_shares_lie_there() -> None:
    """Two fast units for three policies: a policy that had none at first gets one by what others show there."""
    units = {"fast": 2, "slow": 6}
    loop = Loop(REVERSED, TRAINED_PER_S, units)
    loop.run(4)
    assert loop.held["c"].get("fast", 0) == 0
    loop.run(496)
    for policy, types in REVERSED.items():
        found = {kind: loop.rule.tokens_per_s(policy, kind) for kind in types}
        assert found == pytest.approx(types, rel=0.05), policy
    assert loop.fewest_units >= 1
    ratio = min(loop.run(600).values()) / optimum(REVERSED, TRAINED_PER_S, units)
    assert 0.9 <= ratio <= 1.02


def test_floors_that_a_lost_unit_broke_are_kept_again_when_it_is_back() -> None:
    """Two policies of two units each, and four units: the only split that keeps both floors is found again."""
    speeds: Speeds = {policy: {"fast": 100.0, "slow": 50.0} for policy in "ab"}
    loop = Loop(speeds, {"a": 500.0, "b": 500.0}, {"fast": 2, "slow": 2}, floor_units=2)
    loop.run(200)
    loop.units["fast"] = 1
    loop.run(200)
    assert any(any(types.values()) for types in loop.held.values())
    loop.units["fast"] = 2
    loop.run(200)
    assert {policy: sum(types.values()) for policy, types in loop.held.items()} == {"a": 2, "b": 2}
