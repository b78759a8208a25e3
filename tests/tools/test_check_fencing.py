"""The exhaustive checks of leases: the design as built is clean, and each rule is missed when it is dropped."""

import check_fencing
import pytest
from fencing_model.designs import MRL, WITHOUT
from fencing_model.search import search
from fencing_model.waiting import MRL as MRL_HABITS
from fencing_model.waiting import Habits, explore
from fencing_model.world import Bounds, Design

QUICK = {"no verify", "no evict", "no evict, no verify", "no expiry", "no kill",
         "asleep at its word", "wakes by itself", "no evict of the awake", "no verify of sleep"}  # fmt: skip


@pytest.mark.parametrize(
    "bounds",
    [Bounds(messages=1), Bounds(messages=1, node_restarts=1), Bounds(messages=1, allocator_restarts=1),
     Bounds(messages=1, sleeps=True), Bounds(messages=1, sleeps=True, node_restarts=1)],
    ids=str,
)  # fmt: skip
def test_as_built_nothing_is_found(bounds: Bounds) -> None:
    """Never two engines, never one that does not own the unit, and the unit is never lost; some states are seen."""
    found = search(MRL, bounds)

    assert found.is_safe, found.path
    assert found.num_states > 700


@pytest.mark.thorough
@pytest.mark.parametrize("bounds", check_fencing.AS_BUILT, ids=str)
def test_as_built_nothing_is_found_with_overtaken_messages(bounds: Bounds) -> None:
    """Two messages at a time, so that one can overtake the other, beside every other fault."""
    found = search(MRL, bounds)

    assert found.is_safe, found.path
    assert found.num_states > 13_000


@pytest.mark.parametrize(
    ("design", "bounds"),
    [
        pytest.param(design, bounds, id=design.name, marks=[] if design.name in QUICK else [pytest.mark.thorough])
        for design, bounds in WITHOUT
    ],
)
def test_every_rule_is_missed(design: Design, bounds: Bounds) -> None:
    """Without it a state is found that must not be; with it none is, under the same faults."""
    found = search(design, bounds)

    assert not found.is_safe
    assert found.path[0] != found.path[-1]
    assert (found.num_lost > 0) == (design.name in {"no expiry", "no kill", "epochs reused"})


@pytest.mark.parametrize(
    ("habits", "num_states", "num_deadlocks"),
    [
        (Habits("block", "until own step"), 7, 2),
        (Habits("block", "timed", publish="step"), 27, 1),
        (Habits("block", "timed", pool="shared"), 128, 0),
        (Habits("block", "timed", crash=True), 904, 4),
        (Habits("never", "until own step", crash=True), 642, 10),
    ],
)
def test_habits_that_mrl_does_not_have_end_in_a_wait_for_ever(
    habits: Habits, num_states: int, num_deadlocks: int
) -> None:
    """Blocking on peers, leases that last until a step, a shared pool: each alone is enough."""
    found = explore(habits)

    assert (found.num_states, found.num_deadlocks) == (num_states, num_deadlocks)
    assert not found.is_live


def test_nobody_waits_for_ever_as_built() -> None:
    """Timed leases, peers never awaited, rings that drop: whoever lives can always step again, also beside a death."""
    assert explore(MRL_HABITS).is_live
    assert explore(MRL_HABITS).num_states == 1406
