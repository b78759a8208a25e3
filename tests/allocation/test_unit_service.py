"""Since when no unit serves a policy, with a table and no clock."""

from mrl.allocation.unit_leases import UnitRow, UnitState, UnservedPolicies

FITS = {"a": frozenset({"cpu:0", "cpu:1"}), "b": frozenset({"cpu:1"})}


def rows(first: UnitState, second: UnitState) -> dict[str, UnitRow]:
    return {"cpu:0": UnitRow("cpu:0", 1, state=first), "cpu:1": UnitRow("cpu:1", 1, state=second)}


def test_a_policy_is_unserved_once_all_its_units_were_dead_for_long() -> None:
    """Whatever else its units do, they may serve it."""
    service = UnservedPolicies(FITS, 0.0)
    service.look(rows(UnitState.CLEARING, UnitState.DEAD), 90.0)
    assert service.longer_than(50.0, 100.0) == ["b"]
    service.look(rows(UnitState.DEAD, UnitState.DEAD), 140.0)
    assert service.longer_than(50.0, 141.0) == ["a", "b"]
    service.look(rows(UnitState.DEAD, UnitState.FREE), 142.0)
    assert service.longer_than(50.0, 142.0) == []


def test_a_unit_on_which_its_engine_failed_serves_a_policy_only_once_that_speaks_there() -> None:
    """Being tried again is not being served, and it says nothing about the engines of others."""
    service = UnservedPolicies(FITS, 0.0)
    for unit in ("cpu:0", "cpu:1"):
        service.failed(unit, "a")
    service.look(rows(UnitState.GRANTED, UnitState.FREE), 100.0)
    assert service.longer_than(50.0, 100.0) == ["a"]
    assert service.is_doubtful("cpu:1", "a")
    assert not service.is_doubtful("cpu:1", "b")
    service.spoke("cpu:1", "b", 100.0)
    assert service.is_doubtful("cpu:1", "a")
    service.spoke("cpu:1", "a", 101.0)
    assert service.longer_than(50.0, 102.0) == []
    service.look(rows(UnitState.DEAD, UnitState.FREE), 200.0)
    assert service.longer_than(50.0, 200.0) == []


def test_who_is_done_and_time_when_nobody_listened_do_not_count() -> None:
    """A policy that was released needs no unit."""
    service = UnservedPolicies(FITS, 0.0)
    service.release("b")
    service.forgive(60.0)
    assert service.longer_than(50.0, 100.0) == []
    assert service.longer_than(50.0, 111.0) == ["a"]
