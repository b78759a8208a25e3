"""The exhaustive checks of leases: the design as built is clean, and each rule is missed when it is dropped."""

import check_fencing
import pytest
from fencing_model.designs import MRL, WITHOUT
from fencing_model.search import search
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
