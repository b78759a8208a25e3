"""Seats on types of units against Hall's condition: a set of policies is short by what it needs above what it fits."""

import itertools
import random

from mrl.allocation.replica_placement import ReplicaPlacement, competing

XY, YZ, XZ = (True, True, False), (False, True, True), (True, False, True)


def slow_competing(wanted: list[int], fits: list[list[bool]], capacity: list[int], size: int) -> set[int]:
    """The smallest of the sets of policies that are short by most; they are short by nothing where all have room."""
    policies, best = range(len(wanted)), (0, 0, set[int]())
    for count in policies:
        for some in itertools.combinations(policies, count + 1):
            room = sum(
                units // size for kind, units in enumerate(capacity) if any(fits[policy][kind] for policy in some)
            )
            short = sum(wanted[policy] for policy in some) - room
            best = min(best, (-short, len(some), set(some)), key=lambda one: one[:2])
    return best[2]


def test_those_who_compete_are_those_who_are_short_by_hall() -> None:
    """For any order in which they come."""
    for seed in range(300):
        rng = random.Random(seed)
        size, num_types = rng.choice((1, 1, 2, 3)), rng.randint(1, 4)
        policies = range(rng.randint(1, 5))
        fits = [[rng.random() < 0.5 for _ in range(num_types)] for _ in policies]
        capacity = [rng.randint(0, 4 * size) for _ in range(num_types)]
        wanted = [rng.randint(0, 3) for _ in policies]
        found = competing(wanted, [size] * len(policies), fits, capacity)
        assert found == slow_competing(wanted, fits, capacity, size), seed


def test_four_policies_on_three_units_of_which_no_two_are_alike() -> None:
    """Each pair of them has room, and so have three; all four do not, whoever fits what."""
    fits = [XY, YZ, XZ, XY]
    assert competing([1] * 3, [1] * 3, fits[:3], [1, 1, 1]) == set()
    assert competing([1] * 4, [1] * 4, fits, [1, 1, 1]) == {0, 1, 2, 3}
    assert competing([1] * 5, [1] * 5, [*fits, (False, False, True)], [1, 2, 2]) == set()


def test_others_move_over_for_who_fits_nothing_else() -> None:
    """The first sits where the second has to; what is free is taken in the order asked for."""
    seats = ReplicaPlacement([1, 1, 1], [XY, (True, False, False), YZ], [1, 1, 1])
    assert [seats.add(0, 1), seats.add(2, 1, [1, 2, 0]), seats.add(1, 2)] == [1, 1, 1]
    assert seats.counts_NK == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert [seats.rivals(policy) for policy in range(3)] == [{0, 1}, {1}, {0, 1, 2}]


def test_larger_replicas_have_room_when_smaller_ones_move_over() -> None:
    """Three of two units where two of one unit are: one of these goes to the other type."""
    seats = ReplicaPlacement([1, 2], [(True, True), (True, False)], [4, 2])
    assert [seats.add(0, 2), seats.add(1, 2)] == [2, 2]
    assert seats.counts_NK == [[0, 2], [2, 0]]
    assert seats.add(0, 1) == 0


def test_whether_all_have_room_is_told_with_the_largest_seated_first() -> None:
    """Seated last, it would find two smaller ones on its type, of which only one would move over."""
    wanted, sizes = [2, 2, 1], [1, 1, 2]
    fits = [(True, True, False), (False, True, True), (True, False, False)]
    assert competing(wanted, sizes, fits, [2, 2, 2]) == set()
    assert competing(wanted, sizes, fits, [1, 2, 2]) == {2}
    assert competing(wanted, sizes, fits, [2, 2, 1]) == {0, 1, 2}
