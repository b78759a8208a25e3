"""What the controller decides, in a world where progress is what shares feed."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest

from mrl.allocation.decision import ControllerState, DecisionRecord, decide
from mrl.allocation.objective import Objective, Reading, Rule

ACCELERATORS = Rule()
TIGHT_ACCELERATORS = Rule(hold_s=450.0, dwell_s=300.0)
"""For a pool that cannot hold one replica of each policy."""
DEMANDS = {"a": 1.33, "b": 3.58, "c": 4.66, "d": 6.94}
GANGS = {"a": 1, "b": 1, "c": 1, "d": 2}
STEP_S = 60.0

Change = Callable[[float, list[Reading]], list[Reading]]


def reading(policy: str, replicas: int, fed: float | None = 0.5, **more: object) -> Reading:
    """A policy of the standard pool."""
    gang = GANGS[policy]
    known = {"policy": policy, "replicas": (replicas,), "progress_per_replica": (gang / DEMANDS[policy],),
             "supply_progress": fed, "units_per_replica": gang, "switch_s": 15.0}  # fmt: skip
    return Reading(**(known | more))  # type: ignore[arg-type]


def unchanged(_now_s: float, readings: list[Reading]) -> list[Reading]:
    """A world in which nothing happens."""
    return readings


def play(
    rule: Rule, units: int, hours: float, change: Change = unchanged, names: Sequence[str] = tuple(DEMANDS)
) -> list[DecisionRecord]:
    """Decisions every `STEP_S`; what is decided holds at once and feeds in proportion."""
    state, counts, records = ControllerState(decided_s=0.0), dict.fromkeys(names, 0), list[DecisionRecord]()
    silent: set[str] = set()
    for step in range(int(3600.0 * hours / STEP_S)):
        fed = {name: min(1.0, counts[name] * GANGS[name] / DEMANDS[name]) for name in names}
        readings = change(STEP_S * step, [reading(name, counts[name], fed[name]) for name in names])
        now_silent = {one.policy for one in readings if one.silent}
        state, record = decide(rule, state, readings, (units,), STEP_S * step, urgent=now_silent != silent)
        silent, counts = now_silent, {name: row[0] for name, row in record.shares.items()}
        records.append(record)
    return records


def started_units(record: DecisionRecord) -> int:
    """Units that policies have more of than before."""
    return sum(
        max(0, record.shares[one.policy][0] - one.replicas[0]) * one.units_per_replica for one in record.readings
    )


def reached(records: Sequence[DecisionRecord], skip: int = 60) -> dict[str, float]:
    """Mean progress of every policy after the first hour."""
    found = dict.fromkeys((one.policy for one in records[0].readings), 0.0)
    for record in records[skip:]:
        for one in record.readings:
            fed = sum(record.shares[one.policy]) * GANGS[one.policy] / DEMANDS[one.policy]
            found[one.policy] += min(1.0, fed) / len(records[skip:])
    return found


def known_late(after_s: Mapping[str, float]) -> Change:
    """A world in which the demand of each policy is unknown until then."""

    def change(now_s: float, readings: list[Reading]) -> list[Reading]:
        return [
            msgspec.structs.replace(one, progress_per_replica=None, supply_progress=None)
            if now_s < after_s[one.policy]
            else one
            for one in readings
        ]

    return change


def test_the_first_shares_are_equal_and_kept_until_all_demands_are_known() -> None:
    """A quarter of the units each, in whole gangs; the unit that is left goes by name."""
    records = play(ACCELERATORS, 12, 1.0, known_late({"a": 540.0, "b": 60.0, "c": 60.0, "d": 60.0}))
    assert {name: row[0] for name, row in records[0].shares.items()} == {"a": 3, "b": 3, "c": 4, "d": 1}
    assert {record.verdict for record in records[1:9]} == {"demand unknown"}
    assert "demand unknown" not in {record.verdict for record in records[9:]}
    assert "moved" in {record.verdict for record in records[9:20]}


@pytest.mark.parametrize("late", list(DEMANDS))
def test_one_unknown_demand_holds_up_the_others_for_a_dwell_and_leaves_no_unit_idle(late) -> None:
    """Then the others share by their demands; who is unknown gets what they do not need, until it is known."""
    records = play(ACCELERATORS, 48, 2.0, known_late(dict.fromkeys(DEMANDS, 60.0) | {late: 3600.0}))
    first = records[0].shares
    assert {record.verdict for record in records[1:10]} == {"demand unknown"}
    assert records[10].verdict == "moved"
    for record in records[10:60]:
        assert record.shares[late] > first[late]
        others = [name for name in DEMANDS if name != late]
        assert all(sum(record.shares[name]) * GANGS[name] >= 0.95 * DEMANDS[name] for name in others)
        used = {name: sum(record.shares[name]) * GANGS[name] for name in DEMANDS}
        assert sum(used[name] for name in others) < 24
        assert 48 - sum(used.values()) < GANGS[late]


def test_a_policy_that_stays_unknown_keeps_its_units_and_takes_none_from_others() -> None:
    """They come as far as they can with what it leaves; from when it is known, all share everything."""
    records = play(ACCELERATORS, 12, 16.0, known_late(dict.fromkeys(DEMANDS, 60.0) | {"a": 6 * 3600.0}))
    assert all(sum(record.shares["a"]) == 3 for record in records[:360])
    progress = reached(records[:360])
    assert min(progress[name] for name in "bcd") > 0.9 * 9 / (sum(DEMANDS.values()) - DEMANDS["a"])
    assert min(reached(records[360:], skip=120).values()) > 0.93 * 12 / sum(DEMANDS.values())


def test_one_unknown_demand_does_not_damp_the_moves_of_the_others() -> None:
    """They come near the optimum of what it leaves them, be that more or less than what it stands at itself."""
    records = play(ACCELERATORS, 12, 8.0, known_late(dict.fromkeys(DEMANDS, 60.0) | {"d": 1e9}))
    kept = sum(records[-1].shares["d"]) * GANGS["d"]
    assert kept == 2
    progress = reached(records)
    assert min(progress[name] for name in "abc") > 0.9


@pytest.mark.parametrize("after", [23, 21])
def test_who_is_unknown_keeps_its_part_when_units_come_and_go(after) -> None:
    """Decisions that cannot wait are made around it as well."""
    first = decide(ACCELERATORS, ControllerState(decided_s=0.0), [reading(name, 0) for name in "abcd"], (22,), 0.0)
    state, counts = first[0], {name: sum(row) for name, row in first[1].shares.items()}
    readings = [reading(name, counts[name]) for name in "abc"]
    unknown = reading("d", 2, None, progress_per_replica=None)
    _, record = decide(ACCELERATORS, state, [*readings, unknown], (after,), 60.0, urgent=True)
    assert record.shares["d"] >= (2,)
    assert sum(record.shares[name][0] * GANGS[name] for name in DEMANDS) <= after


def test_who_comes_unknown_gets_an_equal_part() -> None:
    """At once, of what the others have; a floor of one would not do to measure it soon."""
    readings = [reading("a", 5), reading("b", 5), reading("c", 0, None, progress_per_replica=None)]
    state = ControllerState(decided_s=0.0, moved_s=0.0)
    _, record = decide(ACCELERATORS, state, readings, (12,), 60.0, urgent=True)
    assert record.shares["c"] >= (4,)


def test_who_stays_unknown_gives_back_what_it_was_lent() -> None:
    """As soon as somebody who is measured needs it."""

    def change(now_s: float, readings: list[Reading]) -> list[Reading]:
        late = known_late(dict.fromkeys(DEMANDS, 60.0) | {"a": 1e9})(now_s, readings)
        more = 4.0 if now_s > 3600.0 else 1.0
        return [
            one if one.policy != "c" else msgspec.structs.replace(one, progress_per_replica=(1.0 / (4.66 * more),))
            for one in late
        ]

    records = play(ACCELERATORS, 36, 3.0, change)
    assert sum(records[59].shares["a"]) > 12
    assert sum(records[-1].shares["a"]) <= 10
    assert sum(records[-1].shares["c"]) >= 14


def test_while_nobody_is_known_nothing_moves() -> None:
    """However long that takes."""
    records = play(ACCELERATORS, 12, 1.0, known_late(dict.fromkeys(DEMANDS, 1e9)))
    assert {record.verdict for record in records[1:]} == {"demand unknown"}


def test_a_policy_that_stays_unknown_is_not_moved_where_it_does_not_fit() -> None:
    """Although the other one would like to have its units, which are the faster ones."""
    stays = Reading(policy="a", replicas=(4, 0), progress_per_replica=None, supply_progress=None, unfit=(False, True))
    wants = Reading(policy="b", replicas=(0, 4), progress_per_replica=(0.5, 0.05), supply_progress=0.2)
    state = ControllerState(decided_s=0.0, moved_s=0.0, unknown_since_s=0.0)
    _, record = decide(ACCELERATORS, state, [stays, wants], (4, 8), 660.0)
    assert record.shares["a"][0] >= 2
    assert record.shares["a"][1] == 0


def test_who_becomes_unknown_again_is_waited_for_again() -> None:
    """The time counts from when it was last known."""

    def change(now_s: float, readings: list[Reading]) -> list[Reading]:
        late = known_late(dict.fromkeys(DEMANDS, 60.0) | {"b": 300.0 if now_s < 1800.0 else 1e9})
        return late(now_s, readings)

    records = play(ACCELERATORS, 12, 1.0, change)
    waits = [place for place, record in enumerate(records) if record.verdict == "demand unknown"]
    assert waits == [*range(1, 5), *range(30, 40)]


def test_progress_is_max_min_in_the_long_run() -> None:
    """Within 3 percent of the optimum, which no fixed split of whole replicas reaches."""
    fixed = max(
        min(a / 1.33, b / 3.58, c / 4.66, 2 * d / 6.94)
        for d in range(1, 6) for c in range(1, 10) for b in range(1, 10) if (a := 12 - 2 * d - c - b) > 0
    )  # fmt: skip
    optimum = 12 / sum(DEMANDS.values())
    least = min(reached(play(ACCELERATORS, 12, 10.0)).values())
    assert least > 0.95 * optimum > fixed


def test_weights_set_the_ratio_of_progress() -> None:
    """Half the weight, half the progress; each within 10 percent."""
    weights = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}

    def weighted(_now_s: float, readings: list[Reading]) -> list[Reading]:
        return [msgspec.structs.replace(one, weight=weights[one.policy]) for one in readings]

    progress = reached(play(msgspec.structs.replace(ACCELERATORS, objective="weighted"), 10, 12.0, weighted))
    theta = 10 / sum(DEMANDS[name] * weight for name, weight in weights.items())
    assert {name: progress[name] / weights[name] for name in "bcd"} == pytest.approx(
        dict.fromkeys("bcd", theta), rel=0.1
    )


def test_throughput_feeds_those_that_train_most_per_unit() -> None:
    """The learner with the best tokens per unit runs all the time; the others keep their floor."""
    rates = {"a": 6000.0, "b": 7000.0, "c": 9000.0, "d": 3500.0}

    def fast(_now_s: float, readings: list[Reading]) -> list[Reading]:
        return [msgspec.structs.replace(one, learner_tokens_per_s=rates[one.policy]) for one in readings]

    rule = msgspec.structs.replace(ACCELERATORS, objective="throughput")
    last = play(rule, 12, 2.0, fast)[-1].shares
    assert last == {"a": (2,), "b": (3,), "c": (5,), "d": (1,)}


def test_a_static_split_follows_the_weights_alone() -> None:
    """Whatever demands are; a silent policy's part goes to the others."""

    def weighted(now_s: float, readings: list[Reading]) -> list[Reading]:
        weights = {"a": 1.0, "b": 0.5, "c": 0.5, "d": 1.0}
        return [
            msgspec.structs.replace(one, weight=weights[one.policy], silent=one.policy == "a" and now_s > 600.0)
            for one in readings
        ]

    records = play(msgspec.structs.replace(ACCELERATORS, objective="static"), 12, 0.5, weighted)
    assert records[5].shares == {"a": (4,), "b": (2,), "c": (2,), "d": (2,)}
    assert records[-1].shares == {"a": (0,), "b": (3,), "c": (3,), "d": (3,)}


def test_a_silent_policy_gives_all_it_has_and_gets_it_back() -> None:
    """In the decision that notices, without waiting for the dwell; its progress stands still meanwhile."""

    def hanging(now_s: float, readings: list[Reading]) -> list[Reading]:
        return [msgspec.structs.replace(one, silent=one.policy == "d" and 3600.0 <= now_s < 7200.0) for one in readings]

    records = play(ACCELERATORS, 12, 3.0, hanging)
    assert records[59].shares["d"][0] > 0
    assert records[60].shares["d"] == (0,)
    assert records[60].progress["d"] == records[119].progress["d"]
    assert records[120].shares["d"][0] > 0


def test_no_unit_is_free_while_a_policy_is_short() -> None:
    """Where one is, it is fewer than a gang, or everybody is fed beyond what is needed."""
    for units in (12, 30):
        for record in play(ACCELERATORS, units, 2.0)[5:]:
            used = {name: row[0] * GANGS[name] for name, row in record.shares.items()}
            short = [name for name in used if used[name] < DEMANDS[name]]
            assert all(units - sum(used.values()) < GANGS[name] for name in short)


def test_moves_keep_the_dwell() -> None:
    """A demand that jumps every ten minutes tempts to move far more often."""

    def jumping(now_s: float, readings: list[Reading]) -> list[Reading]:
        favoured = "abcd"[int(now_s / 600.0) % 4]
        return [
            msgspec.structs.replace(one, progress_per_replica=(one.units_per_replica / 15.0,))
            if one.policy == favoured
            else one
            for one in readings
        ]

    records = play(ACCELERATORS, 12, 3.0, jumping)[1:]
    moved = [(step, record) for step, record in enumerate(records) if started_units(record)]
    taking = [step for step, record in moved if started_units(record) > 12 - sum(
        reading.replicas[0] * reading.units_per_replica for reading in record.readings)]  # fmt: skip
    moved_steps = [step for step, _ in moved]
    assert all((b - a) * STEP_S >= ACCELERATORS.dwell_s for a, b in pairwise(moved_steps) if b in taking)
    assert len(taking) > 3
    assert "dwell" in {record.verdict for record in records}


def test_free_units_are_taken_without_dwell() -> None:
    """Nobody loses by it; the same move at another policy's cost has to wait."""
    state = ControllerState(decided_s=0.0, moved_s=59.0)
    short, level = reading("b", 1, 0.3), reading("c", 4, 0.8)
    _, growing = decide(ACCELERATORS, state, [short, level], (7,), 60.0)
    _, taking = decide(ACCELERATORS, state, [short, reading("c", 6, 1.0)], (7,), 60.0)
    assert (growing.verdict, growing.shares["b"]) == ("moved", (3,))
    assert taking.verdict == "dwell"


def test_a_small_gain_moves_nothing() -> None:
    """Level policies with what they need: another split is hardly better."""
    rule = msgspec.structs.replace(ACCELERATORS, min_gain=0.5)
    records = play(rule, 12, 2.0)
    assert "gain too small" in {record.verdict for record in records[2:]}
    assert all((record.gain or 0.0) < 0.5 for record in records[2:] if record.verdict == "gain too small")


def test_in_a_tight_pool_everybody_is_served_within_the_bound() -> None:
    """Two units for four policies, one of which needs both at once."""
    records = play(TIGHT_ACCELERATORS, 2, 6.0)
    bound_s = TIGHT_ACCELERATORS.max_unserved_s + 4 * TIGHT_ACCELERATORS.dwell_s + 120.0
    for name in DEMANDS:
        served = [step for step, record in enumerate(records) if record.shares[name][0]]
        gaps = [later - earlier for earlier, later in pairwise([0, *served, len(records) - 1])]
        assert max(gaps) * STEP_S <= bound_s
    assert all(sum(row[0] * GANGS[name] for name, row in record.shares.items()) <= 2 for record in records)


@pytest.mark.parametrize("objective", ["max_min", "static"])
def test_turns_in_a_tight_pool_last_a_dwell(objective: Objective) -> None:
    """Also where everybody waits for longer than the bound: one unit, three policies, ten minutes each."""
    rule = msgspec.structs.replace(ACCELERATORS, objective=objective, max_unserved_s=120.0)
    records = play(rule, 1, 6.0, names=("a", "b", "c"))
    owners = [next(name for name in "abc" if record.shares[name][0]) for record in records]
    starts_s = [STEP_S * step for step, (old, new) in enumerate(pairwise(owners), 1) if old != new]
    assert min(later - earlier for earlier, later in pairwise(starts_s)) >= rule.dwell_s
    assert all(owners.count(name) >= len(owners) / 4 for name in "abc")


def test_turns_in_a_tight_pool_last_as_long_before_anything_is_measured() -> None:
    """Whoever has the unit keeps it until it is the other one's turn."""
    rule = msgspec.structs.replace(ACCELERATORS, max_unserved_s=120.0)
    unknown = lambda _, readings: [msgspec.structs.replace(one, progress_per_replica=None) for one in readings]  # noqa: E731
    records = play(rule, 1, 6.0, unknown, names=("a", "b", "c"))
    owners = [next(name for name in "abc" if record.shares[name][0]) for record in records]
    starts_s = [STEP_S * step for step, (old, new) in enumerate(pairwise(owners), 1) if old != new]
    assert min(later - earlier for earlier, later in pairwise(starts_s)) >= rule.dwell_s
    assert all(owners.count(name) >= len(owners) / 4 for name in "abc")


def test_a_pool_that_shrinks_is_shared_anew_at_once() -> None:
    """What does not fit any more goes, whatever dwell and gain say."""
    state, readings = ControllerState(decided_s=0.0, moved_s=59.0), [reading("b", 4), reading("c", 4)]
    _, record = decide(ACCELERATORS, state, readings, (5,), 60.0)
    assert record.verdict == "moved"
    assert record.gain is None
    assert sum(row[0] for row in record.shares.values()) == 5


def test_recorded_decisions_are_made_again_from_what_was_written_down() -> None:
    """State, readings and record go through JSON; the same inputs give the same outputs."""
    records = play(ACCELERATORS, 12, 3.0)
    state = ControllerState(decided_s=0.0)
    for step, record in enumerate(records):
        stored = msgspec.json.decode(msgspec.json.encode(record.readings), type=tuple[Reading, ...])
        state = msgspec.json.decode(msgspec.json.encode(state), type=ControllerState)
        state, again = decide(ACCELERATORS, state, stored, (12,), STEP_S * step, urgent=record.urgent)
        assert (again.shares, again.verdict, again.progress) == (record.shares, record.verdict, record.progress)


def test_a_record_says_in_words_what_a_move_was_made_for() -> None:
    """Who takes part comes first: then dwell and least gain did not count either."""
    state = ControllerState(decided_s=0.0)
    readings = [reading("a", 6), reading("b", 0, floor_replicas=0)]
    whys = []
    for units, floor, urgent in ((6, 0, False), (6, 1, False), (6, 0, True)):
        readings = [msgspec.structs.replace(one, floor_replicas=floor) for one in readings]
        _, record = decide(ACCELERATORS, state, readings, (units,), 60.0, urgent=urgent)
        whys.append((record.verdict, record.why))
    assert whys == [
        ("moved", "a better split"),
        ("moved", "the split before was not allowed"),
        ("moved", "who takes part has changed"),
    ]


def test_an_unmeasured_policy_is_not_sent_to_a_type_on_which_it_does_not_fit() -> None:
    """Though it is the only one with a free unit, and all that is known of the others says that it is fast."""
    known = Reading(policy="a", replicas=(0, 2), progress_per_replica=(0.9, 0.3), supply_progress=0.5)
    new = Reading(policy="b", replicas=(0, 1), progress_per_replica=None, supply_progress=None, unfit=(True, False))
    state = ControllerState(decided_s=0.0)
    _, record = decide(ACCELERATORS, state, [known, new], (2, 3), 100.0, urgent=True)
    assert record.shares["b"][0] == 0
    assert record.shares["b"][1] >= 1
