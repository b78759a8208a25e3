"""The lease table of units: which transitions there are, and that none happens out of turn."""

import itertools

import pytest

from mrl.allocation.unit_leases import OWNED, UnitState, UnitTable

FIRST = 100


def table(*units: str) -> UnitTable:
    """A table whose units are all proved empty."""
    made = UnitTable(units or ("cpu:0",), FIRST)
    for unit in made.rows:
        assert made.free(unit, FIRST, 0.0)
    made.take_log()
    return made


def test_the_life_of_a_lease() -> None:
    """Granted, spoken, asked to end, cleared, proved empty; the next lease has a larger epoch."""
    units = table()
    row = units.rows["cpu:0"]

    assert units.grant("cpu:0", "a", 1.0)
    assert (row.epoch, row.policy, row.state) == (FIRST + 1, "a", UnitState.GRANTED)
    assert units.renew("cpu:0", FIRST + 1, "a", 2.0)
    assert (row.state, row.renewed_s) == (UnitState.ACTIVE, 2.0)
    assert units.revoke("cpu:0", FIRST + 1, 3.0, grace_s=5.0, why="moved")
    assert (row.state, row.deadline_s) == (UnitState.DRAINING, 8.0)
    assert units.clear("cpu:0", FIRST + 1, 9.0, within_s=30.0, why="late")
    assert units.free("cpu:0", FIRST + 1, 10.0)
    assert (row.policy, row.state) == ("", UnitState.FREE)
    assert units.grant("cpu:0", "b", 11.0)
    assert row.epoch == FIRST + 2
    assert [(line.at_s, line.state.value, line.policy) for line in units.take_log()] == [
        (1.0, "granted", "a"),
        (2.0, "active", "a"),
        (3.0, "draining", "a"),
        (9.0, "clearing", "a"),
        (10.0, "free", ""),
        (11.0, "granted", "b"),
    ]
    assert units.take_log() == []


CALLS = {
    "grant": lambda units, epoch: units.grant("cpu:0", "a", 1.0),
    "renew": lambda units, epoch: units.renew("cpu:0", epoch, "a", 1.0),
    "revoke": lambda units, epoch: units.revoke("cpu:0", epoch, 1.0, grace_s=1.0, why=""),
    "clear": lambda units, epoch: units.clear("cpu:0", epoch, 1.0, within_s=1.0, why=""),
    "free": lambda units, epoch: units.free("cpu:0", epoch, 1.0),
    "bury": lambda units, epoch: units.bury("cpu:0", epoch, 1.0),
}
ALLOWED = {
    "grant": {UnitState.FREE},
    "renew": OWNED,
    "revoke": OWNED,
    "clear": {*OWNED, UnitState.DRAINING},
    "free": {UnitState.CLEARING, UnitState.DEAD},
    "bury": {UnitState.CLEARING},
}


@pytest.mark.parametrize(("call", "state"), list(itertools.product(CALLS, UnitState)))
def test_every_transition_has_its_states(call: str, state: UnitState) -> None:
    """From every other state nothing changes."""
    units = table()
    row = units.rows["cpu:0"]
    row.policy, row.state, row.epoch = "a", state, FIRST + 5

    assert CALLS[call](units, FIRST + 5) == (state in ALLOWED[call])
    assert (row.state is state) or state in ALLOWED[call]


@pytest.mark.parametrize("call", [name for name in CALLS if name != "grant"])
def test_a_word_about_another_epoch_changes_nothing(call: str) -> None:
    """Neither an older nor a newer one."""
    for state, epoch in itertools.product(ALLOWED[call], (FIRST + 4, FIRST + 6)):
        units = table()
        row = units.rows["cpu:0"]
        row.policy, row.state, row.epoch = "a", state, FIRST + 5

        assert not CALLS[call](units, epoch)
        assert (row.state, row.epoch) == (state, FIRST + 5)


def test_another_policy_does_not_renew() -> None:
    """An engine that runs under the epoch of somebody else is no holder."""
    units = table()
    units.grant("cpu:0", "a", 0.0)
    assert not units.renew("cpu:0", FIRST + 1, "b", 1.0)


def test_silent_and_overdue_rows_are_found_and_a_gap_is_forgiven() -> None:
    """An engine that starts has longer; a gap in the allocator's own time makes nobody late."""
    units = table("cpu:0", "cpu:1", "cpu:2")
    for unit in units.rows:
        units.grant(unit, "a", 0.0)
    units.renew("cpu:0", FIRST + 1, "a", 0.0)
    units.revoke("cpu:1", FIRST + 1, 0.0, grace_s=2.0, why="")

    def silent(now_s: float) -> list[str]:
        return [row.unit for row in units.silent(now_s, ttl_s=3.0, start_s=9.0)]

    assert silent(3.0) == []
    assert silent(3.1) == silent(9.0) == ["cpu:0"]
    assert silent(9.1) == ["cpu:0", "cpu:2"]
    assert [row.unit for row in units.overdue(2.1)] == ["cpu:1"]
    units.forgive(10.0)
    assert silent(13.0) == units.overdue(12.0) == []


def test_what_an_earlier_allocator_granted_is_adopted_once_and_only_at_first() -> None:
    """A row that has been cleared, or granted, is not taken over any more."""
    units = UnitTable(["cpu:0", "cpu:1"], FIRST)
    assert units.adopt("cpu:0", 7, "a", 1.0)
    row = units.rows["cpu:0"]
    assert (row.epoch, row.policy, row.state) == (7, "a", UnitState.GRANTED)
    assert not units.adopt("cpu:0", 8, "b", 2.0)
    assert units.renew("cpu:0", 7, "a", 2.0)
    assert row.state is UnitState.ACTIVE
    units.free("cpu:1", FIRST, 1.0)
    assert not units.adopt("cpu:1", 8, "b", 2.0)

    units.clear("cpu:0", 7, 3.0, within_s=1.0, why="")
    units.free("cpu:0", 7, 4.0)
    units.grant("cpu:0", "b", 5.0)
    assert row.epoch == FIRST + 1
