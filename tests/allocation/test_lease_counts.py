"""Leases begun and ended, from hand-made transitions."""

from mrl.allocation.unit_leases import LeaseCounts, Transition, UnitState

NEEDED, GONE = "another policy needs it more", "its engine is gone"


def turn(state: UnitState, policy: str = "qwen", why: str = "", unit: str = "cpu:0") -> Transition:
    return Transition(0.0, unit, 1, policy, state, why)


def test_a_lease_that_is_taken_back_begins_once_and_ends_once() -> None:
    """Whether its engine ends in time or not; freed units count as nothing."""
    counts = LeaseCounts()
    states = [(UnitState.FREE, ""), (UnitState.GRANTED, "wanted"), (UnitState.ACTIVE, "its engine spoke")]
    counts.add(turn(state, why=why) for state, why in states)
    assert (counts.begun, counts.ended) == ({"qwen": 1}, {})
    states = [(UnitState.DRAINING, NEEDED), (UnitState.CLEARING, "it did not end in time"), (UnitState.DEAD, "no")]
    counts.add(turn(state, why=why) for state, why in states)
    counts.add([turn(UnitState.FREE, policy="")])
    assert counts.ended == {("qwen", NEEDED): 1}
    counts.add([turn(UnitState.GRANTED, "llama"), turn(UnitState.CLEARING, "llama", GONE)])
    assert counts.begun == {"qwen": 1, "llama": 1}
    assert counts.ended == {("qwen", NEEDED): 1, ("llama", GONE): 1}


def test_units_are_counted_apart_and_a_lease_of_an_earlier_allocator_only_ends() -> None:
    """It was begun, and counted, before."""
    counts = LeaseCounts()
    counts.add([turn(UnitState.ACTIVE, why="of an earlier allocator"), turn(UnitState.GRANTED, unit="cpu:1")])
    counts.add([turn(UnitState.DRAINING, why=NEEDED), turn(UnitState.DRAINING, why=NEEDED, unit="cpu:1")])
    assert counts.begun == {"qwen": 1}
    assert counts.ended == {("qwen", NEEDED): 2}
