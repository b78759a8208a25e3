"""A fair part for who is unmeasured, and what the others leave."""

from hypothesis import given
from hypothesis import strategies as st

from mrl.allocation.decision import ControllerState, decide
from mrl.allocation.objective import Reading, Rule
from mrl.allocation.proportional import fair_parts, units_left, with_units_left


def reading(policy: str, *replicas: int, known: bool = False, **more: object) -> Reading:
    """A policy that has these replicas."""
    progress = (0.1,) * len(replicas) if known else None
    named = {"policy": policy, "replicas": replicas, "progress_per_replica": progress, "supply_progress": None}
    return Reading(**(named | more))  # type: ignore[arg-type]


def test_a_part_is_what_it_has_up_to_an_equal_split() -> None:
    """Who has less than its floor gets all of it; the measured are not asked."""
    found = fair_parts([reading("a", 9), reading("b", 2), reading("c", 0), reading("d", 1, known=True)], (16,))
    assert found == {"a": (4,), "b": (2,), "c": (4,)}


def test_a_part_is_of_units_that_are_up() -> None:
    """Of a type that lost units it keeps no more than there are, whatever it has of the others."""
    found = fair_parts([reading("a", 3, 1), reading("b", 1, 3, known=True)], (2, 6))
    assert found == {"a": (2, 1)}


def test_what_is_left_over_goes_to_who_has_the_fewest_units() -> None:
    """In whole replicas, to types on which it fits; the measured and the silent get nothing of it."""
    readings = [
        reading("a", 3, 0),
        reading("b", 0, 0, units_per_replica=2),
        reading("c", 1, 0, known=True),
        reading("d", 0, 0, silent=True),
        reading("e", 0, 1, unfit=(True, False)),
    ]
    shares = {one.policy: one.replicas for one in readings}
    assert units_left((10, 3), readings, shares) == (6, 2)
    assert with_units_left(shares, readings, (10, 3)) == {
        "a": (5, 0),
        "b": (2, 0),
        "c": (1, 0),
        "d": (0, 0),
        "e": (0, 3),
    }


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=5),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_parts_and_rest_never_exceed_what_there_is(rows, capacity) -> None:
    """Nor is a unit left that an unmeasured policy could take."""
    readings = [
        reading(f"p{place}", *counts, known=known, units_per_replica=gang)
        for place, (*counts, gang, known) in enumerate(rows)
    ]
    kept = fair_parts(readings, capacity)
    assert min(units_left(capacity, readings, kept)) >= 0
    dealt = with_units_left(kept, readings, capacity)
    left = units_left(capacity, readings, dealt)
    assert min(left) >= 0
    smallest = min((one.units_per_replica for one in readings if one.policy in kept), default=99)
    assert max(left) < smallest


def test_units_that_come_free_are_taken_at_once_whatever_the_dwell() -> None:
    """Without a better split of the others."""
    readings = [
        reading("a", 4, known=True, progress_per_replica=(0.5,), supply_progress=1.0),
        reading("b", 2),
    ]
    state = ControllerState(decided_s=0.0, moved_s=600.0, unknown_since_s=0.0)
    _, record = decide(Rule(), state, readings, (9,), 660.0)
    assert (record.verdict, record.shares) == ("moved", {"a": (4,), "b": (5,)})


def test_what_the_others_had_is_no_start_where_it_fits_no_longer() -> None:
    """A measured policy that holds what another's part needs gives it up, also with types of units."""
    readings = [
        reading("a", 4, 4, known=True, progress_per_replica=(0.5, 0.2), supply_progress=1.0),
        reading("b", 0, 0),
    ]
    state = ControllerState(decided_s=0.0, moved_s=0.0)
    _, record = decide(Rule(), state, readings, (4, 4), 60.0, urgent=True)
    used = [sum(counts[kind] for counts in record.shares.values()) for kind in range(2)]
    assert max(used) <= 4
    assert sum(record.shares["b"]) >= 4
