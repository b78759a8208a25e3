"""The core of unit leases, with real guards and simulated engines, nodes and mail."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.allocation.decision import DecisionRecord
from mrl.allocation.engine_totals import EngineIncrement, LineSample
from mrl.allocation.meter import ONLY_TYPE
from mrl.allocation.node_guard import NodeGuard, Seen
from mrl.allocation.objective import Rule
from mrl.allocation.unit_controller import UnitController, UnitsByType, timed_rule
from mrl.allocation.unit_core import UnitCore, UnitSettings
from mrl.allocation.unit_leases import OWNED, UnitState
from mrl.records.leases import LearnerReport, LeaseGrant, LeaseRequest, ReportAck
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitReport

SETTINGS = UnitSettings(ttl_s=2.0, start_s=20.0, grace_s=1.0, clear_s=5.0, slots_per_unit=4)
TURN_S = 0.1


class Wanted:
    """A rule that wants what the test says."""

    def __init__(self, **wanted: int) -> None:
        self.wanted = wanted
        self.switches: list[float] = []
        self.switch_s: dict[str, float] = {}

    def add_rollout(self, policy: str, unit_type: str, use: EngineIncrement) -> None: ...

    def add_report(self, report: LearnerReport, now_s: float) -> None: ...

    def add_switch(self, policy: str, switch_s: float) -> None:
        self.switches.append(switch_s)

    def release(self, policy: str) -> None:
        self.wanted[policy] = 0

    def targets(
        self,
        usable: Mapping[str, UnitsByType],
        held: Mapping[str, UnitsByType],
        starting_s: Mapping[str, float],
        now_s: float,
    ) -> dict[str, dict[str, int]]:
        return {policy: {ONLY_TYPE: count} for policy, count in self.wanted.items()}

    def records(self) -> list[DecisionRecord]:
        return []

    def demand_units(self, policy: str) -> float:
        return 0.0

    def progress(self, policy: str) -> float:
        return 0.0

    def tokens_per_s(self, policy: str, unit_type: str) -> float:
        return 0.0

    def num_reports(self, policy: str) -> int:
        return 0


class World:
    """One allocator, one node, and its engines: unit -> (epoch, policy, when it first speaks)."""

    def __init__(
        self,
        rule: object,
        units: tuple[str, ...] = ("cpu:0", "cpu:1"),
        policies: str = "ab",
        *,
        engines_sleep: bool = False,
        types: Mapping[str, str] | None = None,
        seen_types: Mapping[str, str] | None = None,
    ) -> None:
        self.types = types
        self.engines_sleep = engines_sleep
        self.units, self.policies, self.rule = units, policies, rule
        self.now_s, self.life = 0.0, 0
        self.engines: dict[str, tuple[int, str, float]] = {}
        self.deaf: set[str] = set()
        """Units whose engine hears no SIGTERM and says nothing."""
        self.immortal: set[str] = set()
        """Units whose engine survives SIGKILL for now."""
        self.tokens: dict[str, float] = {}
        self.start_s = 0.5
        self.guard = NodeGuard("node", units, wake_s=5.0, types=seen_types)
        self.sleepers: dict[str, set[str]] = {unit: set() for unit in units}
        """Unit -> policies with an engine that sleeps there."""
        self.woken: list[str] = []
        self.failed: dict[str, str] = {}
        """Units that the node calls out of service -> policy whose engine fails there."""
        self.away = False
        self.decides = True
        """Whether the allocator's period comes round."""
        self.restart()

    def restart(self) -> None:
        """An allocator that knows nothing."""
        self.life += 1
        fits = {policy: frozenset(self.units) for policy in self.policies}
        settings = replace(SETTINGS, sleeping_policies=frozenset(self.policies if self.engines_sleep else ""))
        self.core = UnitCore(fits, self.rule, settings, self.now_s, life=self.life, types=self.types)  # type: ignore[arg-type]

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN_S)):
            self.turn()

    def turn(self) -> None:
        self.now_s += TURN_S
        for action in self.guard.step(self.now_s, self.look):
            if action.kind in ("start", "wake"):
                assert action.unit not in self.engines, "two owners"
                assert (action.kind == "wake") == (action.policy in self.sleepers[action.unit])
                self.sleepers[action.unit].discard(action.policy)
                self.woken += [action.policy] if action.kind == "wake" else []
                self.engines[action.unit] = (action.epoch, action.policy, self.now_s + self.start_s)
            else:
                self.end(action.unit, kill=True)
        if self.away:
            return
        [orders] = self.core.handle(self.guard.report(failed=self.failed), self.now_s)
        assert isinstance(orders, NodeOrders)
        for action in self.guard.obey(orders, self.now_s):
            if action.kind == "sleep" and action.unit in self.engines and action.unit not in self.deaf:
                self.sleepers[action.unit].add(self.engines.pop(action.unit)[1])
            elif action.kind == "end":
                self.end(action.unit, kill=False)
        for unit, (epoch, policy, speaks_s) in list(self.engines.items()):
            if self.now_s >= speaks_s and unit not in self.deaf:
                self.guard.woke(unit, epoch)
                self.ask(unit, epoch, policy)
        if self.decides:
            self.core.tick(self.now_s)

    def look(self, unit: str) -> Seen:
        return Seen(unit not in self.engines, frozenset(self.sleepers[unit]))

    def ask(self, unit: str, epoch: int, policy: str) -> LeaseGrant:
        tokens = self.tokens[unit] = self.tokens.get(unit, 0.0) + 40.0
        request = LeaseRequest(
            holder=f"worker/{policy}/0", policy=policy, generated_tokens=int(tokens), slot_seconds=tokens / 100.0,
            epoch=epoch, slots=4, unit=unit, unit_epoch=epoch,
        )  # fmt: skip
        [grant] = self.core.handle(request, self.now_s)
        assert isinstance(grant, LeaseGrant)
        return grant

    def end(self, unit: str, *, kill: bool) -> None:
        if unit in self.engines and (kill or unit not in self.deaf) and unit not in self.immortal:
            del self.engines[unit]

    def owners(self) -> dict[str, str]:
        return {unit: policy for unit, (_, policy, _) in self.engines.items()}


def test_units_are_granted_started_and_spoken_for() -> None:
    """After the first proof; how long it took is measured."""
    rule = Wanted(a=1, b=1)
    world = World(rule)
    world.run(2.0)
    assert sorted(world.owners().values()) == ["a", "b"]
    assert all(row.state is UnitState.ACTIVE for row in world.core.table.rows.values())
    assert rule.switches == [pytest.approx(0.6, abs=0.2)] * 2


def test_a_unit_moves_and_its_old_engine_gets_no_more_slots() -> None:
    """From the moment it is asked to end, before it has ended."""
    world = World(rule := Wanted(a=2, b=0))
    world.run(2.0)
    world.immortal |= {"cpu:0", "cpu:1"}
    rule.wanted = {"a": 1, "b": 1}
    world.run(0.3)
    states = {row.unit: row.state for row in world.core.table.rows.values()}
    assert sorted(states.values()) == [UnitState.ACTIVE, UnitState.DRAINING]
    for unit, state in states.items():
        assert world.ask(unit, *world.engines[unit][:2]).slots == (4 if state is UnitState.ACTIVE else 0)
    world.immortal.clear()
    world.run(2.0)
    assert sorted(world.owners().values()) == ["a", "b"]


def test_a_unit_is_busy_while_the_engine_of_its_lease_has_answers_in_flight() -> None:
    """Also while that is asked to end; what an older lease's engine says is nothing. Nobody's time is idle."""
    world = World(rule := Wanted(a=1, b=0), units=("cpu:0",))
    world.run(2.0)
    epoch = world.engines["cpu:0"][0]

    def say(active_s: float, epoch: int) -> None:
        request = LeaseRequest(
            holder="worker/a/0", policy="a", generated_tokens=0, slot_seconds=0.0, epoch=epoch, unit="cpu:0",
            unit_epoch=epoch, active_s=active_s,
        )  # fmt: skip
        world.core.handle(request, world.now_s)

    for active_s in (0.0, 3.0):
        say(active_s, epoch)
    for active_s in (0.0, 100.0):
        say(active_s, epoch - 1)
    rule.wanted = {"a": 0, "b": 0}
    world.core.tick(world.now_s)
    assert world.core.table.rows["cpu:0"].state is UnitState.DRAINING
    say(4.0, epoch)
    assert world.core.idle.shares(20.0) == pytest.approx({"cpu:0": 0.8})


def test_a_silent_engine_is_killed_after_its_grace_and_replaced() -> None:
    """Within ttl, grace, and a little."""
    world = World(Wanted(a=1, b=1))
    world.run(2.0)
    before = world.engines["cpu:0"][0]
    world.deaf.add("cpu:0")
    world.run(SETTINGS.ttl_s + SETTINGS.grace_s + 0.6)
    assert world.engines["cpu:0"][0] > before
    whys = [line.why for line in world.core.take_log() if line.unit == "cpu:0"]
    assert whys[3:6] == ["its engine is silent", "it did not end in time", "proved quiet"], whys


def test_an_engine_that_cannot_be_killed_keeps_its_unit_from_everybody_until_it_is_gone() -> None:
    """Nobody is granted what is not proved empty; the rest goes on."""
    world = World(rule := Wanted(a=2, b=0))
    world.run(2.0)
    world.immortal.add("cpu:0")
    world.deaf.add("cpu:0")
    rule.wanted = {"a": 0, "b": 2}
    world.run(10.0)
    assert world.core.table.rows["cpu:0"].state is UnitState.DEAD
    assert world.owners() == {"cpu:0": "a", "cpu:1": "b"}
    world.immortal.clear()
    world.deaf.clear()
    world.run(2.0)
    assert world.owners() == {"cpu:0": "b", "cpu:1": "b"}


def test_a_unit_whose_engines_fail_is_nobodys_while_its_node_says_so_and_then_tried_again() -> None:
    """Called dead, with what is there; the other unit goes on. Who failed there comes last afterwards."""
    world = World(rule := Wanted(a=1, b=1))
    world.run(2.0)
    [unit] = [unit for unit, policy in world.owners().items() if policy == "b"]
    world.end(unit, kill=True)
    world.failed = {unit: "b"}
    world.run(30.0)
    assert world.core.table.rows[unit].state is UnitState.DEAD
    assert list(world.owners().values()) == ["a"]
    assert [line.why for line in world.core.take_log() if line.state is UnitState.DEAD] == ["its engines fail"]
    rule.wanted = {"a": 2, "b": 1}
    world.run(0.2)
    world.failed = {}
    world.run(2.0)
    assert list(world.owners().values()) == ["a", "a"]
    assert world.core.table.rows[unit].state is UnitState.ACTIVE


def test_a_policy_that_no_unit_serves_for_long_is_told() -> None:
    """Trying again does not put that off, an engine that speaks does; others are not concerned."""
    world = World(Wanted(a=1, b=0), units=("cpu:0",), policies="ab")
    world.core._settings = replace(SETTINGS, unserved_s=60.0)
    world.run(2.0)
    world.start_s = 1000.0
    for _ in range(5):
        world.end("cpu:0", kill=True)
        world.failed = {"cpu:0": "a"}
        world.run(10.0)
        assert world.core.unserved(world.now_s) == []
        world.failed = {}
        world.run(2.0)
        assert world.owners() == {"cpu:0": "a"}
    world.run(5.0)
    assert world.core.unserved(world.now_s) == ["a"]
    world.engines["cpu:0"] = (*world.engines["cpu:0"][:2], 0.0)
    world.run(1.0)
    assert world.core.unserved(world.now_s) == []


def test_policies_share_the_units_that_are_left_and_none_is_left_of_all() -> None:
    """With the rule that decides in runs: units that fail are no capacity, and none at all is an answer too."""
    kinds = {"a": "cpu", "b": "cpu"}
    rule = UnitController(
        kinds, {"cpu": 2}, Rule(), floor_units=1, switching_share=0.1, slots_per_unit=4, hung_s=120.0, weights={},
        now_s=0.0,
    )  # fmt: skip
    world = World(rule)
    world.run(3.0)
    assert sorted(world.owners().values()) == ["a", "b"]
    for unit in world.units:
        world.end(unit, kill=True)
        world.failed[unit] = "a"
        world.run(3.0)
        assert unit not in world.owners()
    assert world.owners() == {}
    world.failed.clear()
    world.run(3.0)
    assert sorted(world.owners().values()) == ["a", "b"]


def test_an_engine_that_starts_slowly_is_waited_for_and_one_that_never_speaks_is_not() -> None:
    """The node says that it is starting; the bound then is that of a start."""
    world = World(Wanted(a=1, b=0), units=("cpu:0",))
    world.start_s = 10.0
    world.run(9.0)
    first = world.engines["cpu:0"][0]
    world.run(3.0)
    assert world.engines["cpu:0"][0] == first
    world.start_s = 1000.0
    world.end("cpu:0", kill=True)
    world.run(SETTINGS.start_s + 5.0)
    assert world.engines["cpu:0"][0] == first + 2, "one start that was given up, and the next"


def test_while_the_allocator_is_away_engines_go_on_and_its_successor_adopts_them() -> None:
    """With their epochs; what ended meanwhile is granted anew, under epochs never used before."""
    world = World(Wanted(a=1, b=1))
    world.run(2.0)
    before = dict(world.engines)
    world.away = True
    world.run(10.0)
    assert world.engines == before
    world.end("cpu:1", kill=True)
    world.away = False
    world.restart()
    world.run(3.0)
    assert world.engines["cpu:0"] == before["cpu:0"]
    assert world.core.table.rows["cpu:0"].state is UnitState.ACTIVE
    assert world.engines["cpu:1"][0] > 2 * EPOCHS_PER_LIFE


def test_a_unit_that_is_proved_empty_is_granted_in_the_same_answer() -> None:
    """It does not stand idle until the next decision."""
    world = World(Wanted(a=1), units=("cpu:0",), policies="a")
    world.run(2.0)
    row = world.core.table.rows["cpu:0"]
    world.core.table.clear("cpu:0", row.epoch, world.now_s, within_s=5.0, why="")
    proof = UnitReport(unit="cpu:0", epoch=row.epoch, cleared_epoch=row.epoch)
    (answer,) = world.core.handle(NodeReport(host="node", life=world.life, units=[proof]), world.now_s)
    assert isinstance(answer, NodeOrders)
    assert [(order.kind, order.policy) for order in answer.orders] == [("start", "a")]


def test_an_engine_that_is_starting_outlives_its_allocator() -> None:
    """Its successor gives it as long as any other that has not spoken yet, which is more than a lease's life."""
    world = World(Wanted(a=1, b=1))
    world.start_s = 4.0 * SETTINGS.ttl_s
    world.run(2.0)
    before = dict(world.engines)
    world.restart()
    world.run(2.0 * SETTINGS.ttl_s)
    assert world.engines == before
    world.run(3.0 * SETTINGS.ttl_s)
    assert world.engines == before
    assert {row.state for row in world.core.table.rows.values()} == {UnitState.ACTIVE}


def test_a_held_unit_whose_node_has_heard_of_later_leases_and_runs_nothing_is_cleared() -> None:
    """Its engine is gone, whatever else happened there."""
    world = World(Wanted(a=1, b=0), units=("cpu:0",))
    world.run(2.0)
    row = world.core.table.rows["cpu:0"]
    unit = UnitReport(unit="cpu:0", epoch=row.epoch + 1)
    world.core.handle(NodeReport(host="node", life=world.life, units=[unit]), world.now_s)
    assert row.state is UnitState.CLEARING


def test_a_standstill_of_the_allocator_itself_is_nobodys_silence() -> None:
    world = World(Wanted(a=1, b=1))
    world.run(2.0)
    before = dict(world.engines)
    world.now_s += 100.0
    world.core.tick(world.now_s)
    assert {row.state for row in world.core.table.rows.values()} == {UnitState.ACTIVE}
    world.run(1.0)
    assert world.engines == before


def test_a_released_policy_gives_all_up_at_once_also_when_its_node_says_so() -> None:
    world = World(rule := Wanted(a=1, b=1))
    world.run(2.0)
    world.core.release("a", world.now_s)
    rule.wanted["b"] = 2
    world.run(2.0)
    assert set(world.owners().values()) == {"b"}
    world.core.handle(NodeReport(host="node", life=world.life, units=[], released=["b", "unknown"]), world.now_s)
    world.run(2.0)
    assert world.owners() == {}


def test_a_released_policy_is_granted_nothing_before_the_next_decision() -> None:
    """Its node goes on to report; a unit that it gave up stays free until then."""
    world = World(Wanted(a=1, b=1))
    world.run(2.0)
    world.core.take_log()
    world.decides = False
    world.core.release("a", world.now_s)
    world.run(2.0)

    assert [(turn.policy, turn.state) for turn in world.core.take_log() if turn.state is UnitState.GRANTED] == []
    assert sorted(world.owners().values()) == ["b"]


def test_what_the_run_does_not_have_is_not_answered() -> None:
    world = World(Wanted(a=1, b=1))
    report = LearnerReport(policy="z", trained_tokens=1, busy_s=1.0, data_wait_s=0.0)
    assert world.core.handle(report, 0.0) == []
    known = LearnerReport(policy="a", trained_tokens=1, busy_s=1.0, data_wait_s=0.0)
    assert world.core.handle(known, 0.0) == [ReportAck(policy="a")]


def test_policies_get_only_units_that_they_fit() -> None:
    fits = {"a": frozenset({"cpu:0"}), "b": frozenset({"gpu:0"})}
    core = UnitCore(fits, Wanted(a=2, b=2), SETTINGS, 0.0, life=1)
    for unit in core.table.rows:
        core.table.free(unit, EPOCHS_PER_LIFE, 0.0)
    core.tick(0.1)
    assert {unit: row.policy for unit, row in core.table.rows.items()} == {"cpu:0": "a", "gpu:0": "b"}


class WantedByType(Wanted):
    """The same by type of unit, and what was measured under which type."""

    def __init__(self, **wanted: dict[str, int]) -> None:
        super().__init__()
        self.by_type, self.seen = wanted, set[tuple[str, str]]()
        self.told: tuple[dict[str, UnitsByType], dict[str, UnitsByType]] = ({}, {})

    def add_rollout(self, policy: str, unit_type: str, use: EngineIncrement) -> None:
        self.seen.add((policy, unit_type))

    def targets(
        self,
        usable: Mapping[str, UnitsByType],
        held: Mapping[str, UnitsByType],
        starting_s: Mapping[str, float],
        now_s: float,
    ) -> dict[str, dict[str, int]]:
        self.told = ({policy: dict(units) for policy, units in usable.items()}, dict(held))
        return self.by_type


def test_units_are_given_and_taken_by_type() -> None:
    """Two policies that swap types both move, though neither wants more units than it has."""
    types = {"cpu:0": "fast", "cpu:1": "fast", "cpu:2": "slow", "cpu:3": "slow"}
    rule = WantedByType(a={"fast": 2}, b={"slow": 2})
    world = World(rule, tuple(types), types=types)
    world.run(5.0)
    assert world.owners() == {"cpu:0": "a", "cpu:1": "a", "cpu:2": "b", "cpu:3": "b"}
    assert rule.seen == {("a", "fast"), ("b", "slow")}
    rule.by_type = {"a": {"fast": 1, "slow": 1}, "b": {"fast": 1, "slow": 1}}
    world.run(8.0)
    owners = world.owners()
    for kind in ("fast", "slow"):
        assert sorted(owners[unit] for unit in types if types[unit] == kind) == ["a", "b"]
    assert rule.told[0]["a"] == {"fast": 2, "slow": 2}
    rule.by_type = {"a": {"slow": 2}, "b": {"fast": 2}}
    world.run(8.0)
    assert world.owners() == {"cpu:0": "b", "cpu:1": "b", "cpu:2": "a", "cpu:3": "a"}
    share = world.core.tick(world.now_s)[0]
    assert {kind: (own.target_units, own.held_units) for kind, own in share.by_type.items()} == {
        "fast": (0, 0), "slow": (2, 2),
    }  # fmt: skip


def test_a_unit_without_a_type_of_its_own_has_the_one_that_its_host_sees() -> None:
    """Also after the allocator has started again. What the configuration says comes first."""
    seen = {"cpu:0": "cpu", "cpu:1": "cpu x2"}
    world = World(WantedByType(), ("cpu:0", "cpu:1"), seen_types=seen)
    world.run(1.0)
    assert world.core.types == seen
    world.restart()
    world.run(1.0)
    assert world.core.types == seen
    world = World(WantedByType(), ("cpu:0", "cpu:1"), types={"cpu:1": "slow"}, seen_types=seen)
    assert [dict(share.by_type) for share in world.core.tick(0.0)] == [{}, {}], "nobody has told of cpu:0 yet"
    world.run(1.0)
    assert world.core.types == {"cpu:0": "cpu", "cpu:1": "slow"}


def test_an_engine_whose_unit_another_policy_gets_sleeps_there_and_is_woken() -> None:
    """Back and forth, under ever larger epochs; one that was silent is ended, and started anew."""
    world = World(rule := Wanted(a=1, b=0), units=("cpu:0",), engines_sleep=True)
    world.run(3.0)
    epochs = []
    for a in (0, 1, 0, 1):
        rule.wanted = {"a": a, "b": 1 - a}
        world.run(5.0)
        assert world.owners() == {"cpu:0": "a" if a else "b"}
        epochs.append(world.engines["cpu:0"][0])
    assert world.woken == ["a", "b", "a"]
    assert epochs == sorted(set(epochs))
    world.deaf.add("cpu:0")
    world.run(8.0)
    assert world.sleepers == {"cpu:0": {"b"}}, "nobody asks a silent one to sleep"


def test_a_released_policy_is_ended_and_does_not_sleep() -> None:
    world = World(Wanted(a=1, b=0), units=("cpu:0",), engines_sleep=True)
    world.run(3.0)
    world.core.release("a", world.now_s)
    world.run(3.0)
    assert (world.owners(), world.sleepers) == ({}, {"cpu:0": set()})


@pytest.mark.parametrize("engines_sleep", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_under_random_faults_nobody_meets_a_second_owner_and_all_units_come_back(
    seed: int, engines_sleep: bool
) -> None:
    """Engines end, get deaf and survive kills; allocators die; wishes change. Afterwards all is as wished."""
    rng, units = random.Random(seed), tuple(f"cpu:{number}" for number in range(4))
    world = World(rule := Wanted(a=2, b=2), units=units, engines_sleep=engines_sleep)
    for _ in range(1500):
        world.turn()
        unit = rng.choice(units)
        match rng.randrange(120):
            case 0:
                world.end(unit, kill=True)
            case 1:
                world.deaf ^= {unit}
            case 2:
                world.immortal ^= {unit}
            case 3:
                world.away = not world.away
            case 4:
                world.restart()
            case 5 | 7 | 8 | 9 | 10:
                count = rng.randint(0, 4)
                rule.wanted = {"a": count, "b": 4 - count}
            case 6:
                world.sleepers[unit].clear()
    assert bool(world.woken) == engines_sleep
    world.deaf.clear()
    world.immortal.clear()
    world.away = False
    rule.wanted = {"a": 3, "b": 1}
    world.run(15.0)
    assert sorted(world.owners().values()) == ["a", "a", "a", "b"]
    assert all(row.state in OWNED and world.engines[row.unit][0] == row.epoch for row in world.core.table.rows.values())


def shares(**options: float) -> UnitController:
    given = {"floor_units": 1, "switching_share": 0.05, "hung_s": 10.0, "slots_per_unit": 2, **options}
    return UnitController({"a": "cpu", "b": "cpu", "c": "gpu"}, {"cpu": 4, "gpu": 2}, Rule(period_s=1.0),
                      weights={}, now_s=0.0, **given)  # type: ignore[arg-type]  # fmt: skip


def typed(units: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Of one type."""
    return {policy: {ONLY_TYPE: count} for policy, count in units.items()}


def totals(units: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {policy: sum(counts.values()) for policy, counts in units.items()}


def feed(rule: UnitController, seconds: int, kappa: Mapping[str, float], *, start: int = 0) -> dict[str, int]:
    """Every second: engines make 100 tokens/s per slot, learners train `kappa` tokens per busy second."""
    usable, held = typed({"a": 4, "b": 4, "c": 2}), {"a": 2, "b": 2, "c": 2}
    for second in range(start + 1, start + seconds + 1):
        for policy, rate in kappa.items():
            rule.add_rollout(policy, ONLY_TYPE, EngineIncrement(held[policy] * 200.0, held[policy] * 2.0))
            rule.add_report(
                LearnerReport(policy=policy, trained_tokens=int(rate * second), busy_s=second, data_wait_s=0.0), second
            )
        held = totals(rule.targets(usable, typed(held), {}, second))
    return held


def test_units_follow_measured_demand_and_kinds_do_not_compete() -> None:
    """200 tokens/s per unit: a needs 1 unit, b needs 3; c is alone on its kind."""
    rule = shares()
    assert feed(rule, 120, {"a": 200.0, "b": 600.0, "c": 100.0}) == {"a": 1, "b": 3, "c": 1}
    assert rule.demand_units("b") == pytest.approx(3.0, rel=0.05)


def half_empty(rule: UnitController, *, full_answers: int = 0) -> float:
    """Two units with 1 and then 2 of 8 answers in flight, which slow each other down; what the demand is said to be."""
    for second in range(1, 121):
        running = 1 + second % 2
        tokens = 5.0 * running / (0.01 + 0.005 * running)
        sample = LineSample(5.0, 5.0, 5.0 * running, tokens)
        rule.add_rollout("a", ONLY_TYPE, EngineIncrement(tokens, 5.0 * running, full_answers, sample))
        rule.add_report(
            LearnerReport(policy="a", trained_tokens=480 * second, busy_s=second, data_wait_s=0.0), 5.0 * second
        )
        usable, held = {"a": 4, "b": 4, "c": 2}, {"a": 2, "b": 2, "c": 2}
        rule.targets(typed(usable), typed(held), {}, 5.0 * second)
    return rule.demand_units("a")


def test_demand_is_in_full_units_also_where_none_ever_was_full() -> None:
    """8 answers make 8 / 0.05 = 160 tokens/s, so 480 take 3 units; the seconds per token seen say 1.06."""
    assert half_empty(shares(slots_per_unit=8)) == pytest.approx(3.0, rel=0.03)


def test_an_engine_that_holds_fewer_answers_than_its_lease_allows_is_full_with_those() -> None:
    """4 make 4 / 0.03 = 133 tokens/s."""
    assert half_empty(shares(slots_per_unit=8), full_answers=4) == pytest.approx(3.6, rel=0.03)


def test_a_hung_policy_has_no_floor_and_gets_its_units_back() -> None:
    rule = shares()
    feed(rule, 60, {"a": 200.0, "b": 600.0, "c": 100.0})
    assert feed(rule, 15, {"b": 600.0, "c": 100.0}, start=60)["a"] == 0
    assert feed(rule, 60, {"a": 200.0, "b": 600.0, "c": 100.0}, start=75)["a"] == 1


def test_a_released_policy_gets_nothing_any_more() -> None:
    rule = shares()
    rule.release("a")
    assert feed(rule, 60, {"a": 200.0, "b": 600.0, "c": 100.0})["a"] == 0


def test_a_free_unit_is_started_also_by_who_starts_slowest() -> None:
    """With all of the time allowed for starts, a horizon without them would leave the unit to nobody."""
    rule = UnitController({"a": "cpu", "b": "cpu"}, {"cpu": 1}, Rule(period_s=1.0), floor_units=0, switching_share=1.0,
                      hung_s=10.0, slots_per_unit=2, weights={}, now_s=0.0)  # fmt: skip
    rule.add_switch("a", 30.0)
    rule.add_switch("b", 2.0)
    held = {"a": 1, "b": 0}
    for second in range(1, 61):
        speaker = "b" if 30 < second <= 45 else "a"
        rule.add_report(
            LearnerReport(policy=speaker, trained_tokens=80 * second, busy_s=second, data_wait_s=0.0), second
        )
        if held["a"]:
            rule.add_rollout("a", ONLY_TYPE, EngineIncrement(400.0, 2.0))
        held = totals(rule.targets(typed({"a": 1, "b": 1}), typed(held), {}, second))
        if second == 44:
            assert held == {"a": 0, "b": 1}
    assert held == {"a": 1, "b": 0}


def one_unit_for_two(*, start_s: float) -> World:
    """Nothing is known yet of how long a start takes."""
    rule = UnitController({"a": "cpu", "b": "cpu"}, {"cpu": 1}, Rule(period_s=0.5), floor_units=0, switching_share=1.0,
                      hung_s=1e9, slots_per_unit=2, weights={}, now_s=0.0)  # fmt: skip
    world = World(rule, ("cpu:0",))
    world.start_s = start_s
    return world


def owners_over(world: World, seconds: float) -> list[tuple[UnitState, str]]:
    """State and owner of the unit, whenever they change; both learners wait."""
    seen: list[tuple[UnitState, str]] = []
    for _ in range(round(seconds / TURN_S)):
        for policy in world.policies:
            told = LearnerReport(policy=policy, trained_tokens=0, busy_s=0.0, data_wait_s=world.now_s)
            world.core.handle(told, world.now_s)
        world.turn()
        row = world.core.table.rows["cpu:0"]
        seen += [(row.state, row.policy)] if seen[-1:] != [(row.state, row.policy)] else []
    return seen


def test_an_engine_is_let_start_however_long_nobody_knew_it_would_take() -> None:
    """Turns are two seconds long until a start of 15 was measured; then the other one has its turn."""
    seen = owners_over(one_unit_for_two(start_s=15.0), 150.0)
    turns = [owner for state, owner in seen if state is UnitState.ACTIVE]
    assert set(turns) == {"a", "b"}
    assert [owner for state, owner in seen if state is UnitState.GRANTED] == turns, "no start was in vain"


def test_an_engine_that_never_comes_up_leaves_the_unit_to_the_other() -> None:
    """At the bound of a start."""
    seen = owners_over(one_unit_for_two(start_s=1e9), 3 * SETTINGS.start_s)
    assert {owner for state, owner in seen if state is UnitState.GRANTED} == {"a", "b"}


def test_units_that_start_slowly_move_seldom() -> None:
    """A twentieth of the time for starts of 30 s: ten minutes between two moves."""
    rule = timed_rule(Rule(period_s=1.0), {"a": 30.0, "b": 0.0}, switching_share=0.05)
    assert (rule.dwell_s, rule.hold_s, rule.window_s) == pytest.approx((600.0, 630.0, 4800.0))
    assert rule.max_unserved_s == pytest.approx(1260.0), "two turns, with their starts"
    assert timed_rule(Rule(period_s=1.0), {"c": 0.0}, switching_share=0.05).dwell_s == 4.0
