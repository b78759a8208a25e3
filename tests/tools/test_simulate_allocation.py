"""The simulated world of the allocator: its constants, its engine, its bound, and what the controller reaches in it."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import simulate_allocation
from allocation_simulation import learner
from allocation_simulation.baselines import Fixed, best_fixed, equal
from allocation_simulation.bound import bound
from allocation_simulation.engine import Group, Replica, Request
from allocation_simulation.large import LargePolicy, LargeWorld, large_instance
from allocation_simulation.outcomes import CONTROLLER, rules, try_rule
from allocation_simulation.rules import Controller, PoolMeters
from allocation_simulation.settings import HOUR_S, A, B, C, D, random_instance, scenarios
from allocation_simulation.world import World

from mrl.allocation.engine_meter import LatencyLine

SHORT = replace(scenarios()["S0"], horizon_s=2 * HOUR_S)


def test_demands_are_those_of_the_specification():
    """Units that just keep each learner busy; fourfold answers fill the cache with 15 requests."""
    assert [round(spec.demand_units(1.0), 2) for spec in (A, B, C, D)] == [1.33, 3.58, 4.66, 6.94]
    assert C.demand_units(4.0) == pytest.approx(12.3, abs=0.02)
    assert [C.full_requests(1.0), C.full_requests(4.0)] == [58, 15]


def test_the_bound_is_the_closed_form_where_nothing_changes():
    """min(1, G / sum d)."""
    still = scenarios()["S0"]
    demands = sum(spec.demand_units(1.0) for spec in still.policies)
    assert bound(still).least_progress == pytest.approx(still.num_units / demands, abs=1e-6)
    assert bound(replace(still, num_units=17)).least_progress == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "least", "myopic"),
    [("S0", 0.727, 0.727), ("S1", 0.540, 0.527), ("S2", 0.685, 0.685), ("S3", 0.774, 0.759), ("S4", 0.531, 0.517)],
)
def test_bounds_are_those_of_the_specification(name, least, myopic):
    """Least progress with and without knowledge of the future."""
    found = bound(scenarios()[name])
    assert tuple(found) == pytest.approx((least, myopic), abs=6e-4)


def test_fixed_splits_are_those_of_the_specification():
    """Equal, and the best in hindsight with and without growing answers."""
    worlds = scenarios()
    assert tuple(equal(worlds["S0"]).values()) == (4, 3, 3, 1)
    assert tuple(best_fixed(worlds["S0"]).values()) == (2, 3, 3, 2)
    assert tuple(best_fixed(worlds["S1"]).values()) == (1, 2, 5, 2)


def test_requests_share_a_replica_as_in_small_steps():
    """Ends of three requests, one of which comes later, with a pause; against a walk in steps of a millisecond."""
    replica = Replica("A", 0, 1, line=(0.01, 0.005), full=8, serving_from_s=0.0)
    lengths = {"x": 100.0, "y": 300.0, "z": 150.0}
    requests = {name: Request(Group(0, 8, 0.0), length, length) for name, length in lengths.items()}
    ends = {}
    replica.add(requests["x"])
    replica.add(requests["y"])
    replica.advance(1.0)
    replica.add(requests["z"])
    replica.advance(2.0)
    replica.pause(2.0, 0.5)
    while replica.running:
        now_s = replica.next_end_s()
        replica.advance(now_s)
        for request in replica.ended():
            ends[next(name for name, one in requests.items() if one is request)] = now_s

    left, now_s, slow = dict(lengths), 0.0, {}
    while left:
        running = [name for name in left if name != "z" or now_s >= 1.0]
        if not 2.0 <= now_s < 2.5:
            for name in running:
                left[name] -= 0.001 / (0.01 + 0.005 * len(running))
        now_s += 0.001
        for name in [name for name in left if left[name] <= 0.0]:
            slow[name] = now_s
            del left[name]
    assert ends == pytest.approx(slow, abs=0.02)
    assert replica.tokens == pytest.approx(sum(lengths.values()))


def test_a_displaced_request_keeps_its_tokens_and_a_lost_one_does_not():
    """Two percent of what was generated is computed again."""
    left = []
    for keep in (True, False):
        replica = Replica("A", 0, 1, line=(0.01, 0.0), full=8, serving_from_s=0.0)
        replica.add(Request(Group(0, 8, 0.0), 400.0, 400.0))
        replica.advance(2.0)
        left += [request.left for request in replica.evict(keep_tokens=keep, rework=0.02)]
    assert left == pytest.approx([204.0, 400.0])


def test_equal_seeds_give_equal_worlds():
    """To the last bit; another seed gives another one."""
    world = replace(SHORT, horizon_s=HOUR_S)
    first, again, other = (World(world, Controller(), seed).run().progress() for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("versions", [1, 2, 4])
def test_nothing_staler_than_the_bound_is_trained_on(monkeypatch, versions):
    """Also where the bound binds, and groups are dropped for it."""
    monkeypatch.setattr(learner, "MAX_STALENESS_VERSIONS", versions)
    world = World(replace(SHORT, num_units=20, horizon_s=HOUR_S), Controller(), 7).run()
    lags = [lag for policy in world.policies.values() for lag in policy.lags]
    assert max(lags) == versions
    assert versions > 2 or sum(policy.dropped_groups for policy in world.policies.values()) > 0


def test_a_group_that_can_only_end_too_stale_frees_its_replica():
    """Four versions are allowed; of a group without an ended answer nobody knows how stale it is."""
    policy = learner.SimulatedPolicy(A, random.Random(1), lambda seconds: None)
    replica = Replica("A", 0, 1, line=(0.01, 0.0), full=8, serving_from_s=0.0)
    policy.replicas.append(replica)
    policy.version, policy.num_running_groups = 5, 3
    old, begun, fresh = Group(0, 7, 0.0), Group(0, learner.GROUP_SIZE, 0.0), Group(1, 7, 0.0)
    for group in (old, begun, fresh):
        replica.add(Request(group, 400.0, 400.0))
        policy.queue.append(Request(group, 300.0, 300.0))

    assert policy.give_up_stale(1.0) == [replica]

    assert [request.group for _, _, request in sorted(replica.running)] == [begun, fresh]
    assert [request.group for request in policy.queue] == [begun, fresh]
    assert (policy.num_running_groups, policy.dropped_groups) == (2, 1)
    assert replica.tokens == pytest.approx(300.0)
    assert policy.give_up_stale(1.0) == []


@pytest.mark.thorough
def test_every_unit_has_one_owner_whatever_moves():
    """With free moves in a world of outages and crashes, at every decision; gangs start at multiples of their size."""

    class Watched(Controller):
        def shares(self, world, *, urgent):
            owned = [unit for policy in world.policies.values() for one in policy.replicas for unit in one.units]
            assert len(owned) == len(set(owned))
            assert not world.down.intersection(owned)
            assert all(one.first_unit % 2 == 0 for one in world.policies["D"].replicas)
            return super().shares(world, urgent=urgent)

    restless = Watched(min_gain=0.0, dwell_s=0.0)
    world = World(replace(scenarios()["S4"], horizon_s=3.5 * HOUR_S), restless, 8).run()
    assert world.accounts.moved_units > 40


def test_a_hanging_learner_gives_its_units_away_and_gets_them_back():
    """Within two minutes and a period; within a period."""
    held = {}

    class Watched(Controller):
        def shares(self, world, *, urgent):
            shares = super().shares(world, urgent=urgent)
            held[world.now_s] = shares["B"]
            return shares

    scenario = replace(SHORT, hangs=(("B", 3600.0, 5400.0),))
    World(scenario, Watched(), 9).run()
    assert held[3540.0] > 0
    assert max(count for now_s, count in held.items() if 3780.0 <= now_s < 5400.0) == 0
    assert max(count for now_s, count in held.items() if 5400.0 <= now_s <= 5520.0) > 0


def test_the_meter_finds_the_demand():
    """Within 12 percent for every policy after two hours, though it sees counters only."""
    rule = Controller()
    World(SHORT, rule, 10).run()
    found = {name: meter.demand_units(spec.gang_units) for (name, meter), spec in
             zip(rule.meters.of.items(), SHORT.policies, strict=True)}  # fmt: skip
    truth = {spec.name: spec.demand_units(1.0) for spec in SHORT.policies}
    assert found == pytest.approx(truth, rel=0.12)


class Metered(Fixed):
    """A fixed split with meters."""

    is_static = False

    def __init__(self, split):
        super().__init__(split)
        self.meters = PoolMeters()

    def shares(self, world, *, urgent):
        self.meters.measure(world)
        return super().shares(world, urgent=urgent)


@pytest.mark.thorough
def test_the_meter_finds_the_demand_where_engines_are_seldom_full():
    """With twice the units that are needed: within 12 percent by the line, and not by the mean seconds per token."""
    counts = {"A": 3, "B": 8, "C": 10, "D": 8}
    units = sum(counts[spec.name] * spec.gang_units for spec in SHORT.policies)
    rule = Metered(lambda _: counts)
    World(replace(SHORT, num_units=units), rule, 10).run()
    misses = []
    for spec in SHORT.policies:
        meter, full = rule.meters.of[spec.name], float(spec.full_requests(1.0))
        engine = meter.engine()
        assert engine.line.sum_c / engine.line.ones < 0.8 * full, "mostly half empty"
        engine.full_requests = full
        truth = spec.demand_units(1.0)
        assert meter.demand_units(spec.gang_units) == pytest.approx(truth, rel=0.12), spec.name
        engine.line = LatencyLine()
        misses.append(abs(meter.demand_units(spec.gang_units) / truth - 1.0))
    assert max(misses) > 0.25


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(scenarios()))
def test_the_controller_keeps_its_bars(name):
    """One seed of eight hours in every scenario."""
    scenario = scenarios()[name]
    trial = try_rule(scenario, CONTROLLER, 77, least_bound=bound(scenario).least_progress)
    assert trial.ratio >= 0.84
    assert trial.moves_per_unit_hour <= 1.0
    assert trial.max_lag <= 4
    assert trial.longest_unserved_s < 300.0


@pytest.mark.thorough
@pytest.mark.parametrize("rule", list(rules()))
def test_no_rule_beats_the_bound(rule):
    """Two percent of slack for what lies in buffers at the edges of time."""
    scenario = replace(scenarios()["S3"], horizon_s=6 * HOUR_S)
    assert try_rule(scenario, rule, 78, least_bound=bound(scenario).least_progress).ratio <= 1.02


def test_random_instances_are_drawn_as_specified():
    """Three to six policies, at most forty units, one growing at odd seeds; the same for the same seed."""
    drawn = [random_instance(seed) for seed in range(1000, 1024)]
    assert drawn[3] == random_instance(1003)
    assert {len(one.policies) for one in drawn} <= {3, 4, 5, 6}
    assert all(sum(spec.gang_units for spec in one.policies) <= one.num_units <= 40 for one in drawn)
    assert [bool(one.growth) for one in drawn] == [False, True] * 12


@pytest.mark.thorough
def test_the_tool_prints_a_table_and_ends_with_json():
    """And with the exit code that its rows have."""
    done = subprocess.run(
        [sys.executable, simulate_allocation.__file__, "--quick", "--scenarios", "S0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["bench"] == "allocation"
    assert done.returncode == int(not all(row["ok"] for row in told["rows"]))
    assert Path(simulate_allocation.__file__).name == "simulate_allocation.py"


@pytest.mark.thorough
def test_many_replicas_are_fed_as_few_are():
    """The world that looks at all of them is the slow twin: under fixed shares both say the same, pauses and all."""
    still = replace(SHORT, num_units=24, crashes=((3, 0.8 * HOUR_S),), growth={"B": (0.5 * HOUR_S, HOUR_S, 3.0)})
    counts = {"A": 4, "B": 6, "C": 6, "D": 4}
    slow, fast = (kind(still, Fixed(lambda _: counts), 3).run() for kind in (World, LargeWorld))
    assert fast.progress() == pytest.approx(slow.progress(), rel=1e-9)
    for name in counts:
        tokens = [[replica.tokens for replica in world.policies[name].replicas] for world in (slow, fast)]
        assert tokens[1] == pytest.approx(tokens[0], rel=1e-9), name


def test_a_replica_that_gets_a_request_has_done_its_work_until_then():
    """Two run beside each other for a second before a third one comes and slows them down."""
    policy = LargePolicy(A, random.Random(1), lambda seconds: None)
    replica = Replica("A", 0, 1, line=(0.01, 0.01), full=8, serving_from_s=0.0)
    policy.replicas.append(replica)
    for _ in range(2):
        replica.add(Request(Group(0, 8, 0.0), 400.0, 400.0))
    policy.queue.append(Request(Group(0, 8, 0.0), 300.0, 300.0))
    assert policy.admit_to(1.0, None) == [replica]
    assert replica.tokens == pytest.approx(2 * 1.0 / 0.03)


def test_no_place_stays_empty_while_a_request_waits():
    """Whatever happens, at every look of the controller; and every unit has one owner."""

    class Watched(Controller):
        def shares(self, world, *, urgent):
            owned = [unit for policy in world.policies.values() for one in policy.replicas for unit in one.units]
            assert len(owned) == len(set(owned))
            for policy in world.policies.values():
                serving = [one for one in policy.replicas if one.serving_from_s < world.now_s]
                loads = [len(one.running) for one in serving]
                assert not policy.queue or all(load >= one.full for load, one in zip(loads, serving, strict=True))
                assert not urgent or all(load <= spec_full(policy) for load in loads)
            return super().shares(world, urgent=urgent)

    def spec_full(policy):
        return policy.spec.full_requests(1.0)  # answers only grow, so that fewer fit later on

    world = LargeWorld(large_instance(6, 48, 2, hours=1.5), Watched(), 2).run()
    assert world.accounts.moved_units > 0
    assert min(world.progress().values()) > 0.0
    assert max(lag for policy in world.policies.values() for lag in policy.lags) <= 4


def test_large_instances_want_a_third_more_than_there_is_and_change():
    """The demands are those drawn; who grows, hangs and is lost is part of the world."""
    drawn = large_instance(64, 4096, 1)
    demands = [spec.demand_units(1.0) for spec in drawn.policies]
    assert sum(demands) == pytest.approx(4096 / 0.75, rel=0.02)
    assert max(demands) > 20 * min(demands)
    assert (len(drawn.growth), len(drawn.outages), len(drawn.crashes), len(drawn.hangs)) == (8, 64, 16, 4)
    assert drawn == large_instance(64, 4096, 1)


@pytest.mark.thorough
def test_a_large_pool_comes_near_its_optimum():
    """A sixteenth of the largest: 12 policies on 192 units for three hours."""
    trial, rows = simulate_allocation.large_trial(12, 192, 5, hours=3.0)
    assert 0.75 <= trial.ratio <= 1.02
    assert trial.moves_per_unit_hour <= 1.0
    assert [row.name for row in rows if row.value <= 0.0] == []


def test_a_missed_bound_is_said(monkeypatch, capsys):
    """Exit code 1, and which one."""
    words = ["simulate_allocation.py", "--scenarios", "--random", "0", "--large", "2", "16", "--hours", "1.5"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(simulate_allocation, "MAX_DECIDE_MS", 1e-6)
    assert simulate_allocation.main() == 1
    assert "MISSED: 2 policies, 16 units, answer by answer: one decision is" in capsys.readouterr().out
