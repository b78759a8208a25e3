"""Which units replicas get."""

import random
from collections import Counter
from dataclasses import replace

from allocation_simulation import placement
from allocation_simulation.placement import Moves, Placed, place
from hypothesis import given
from hypothesis import strategies as st


def after(placed: list[Placed], moves: Moves) -> list[Placed]:
    """What stands once the moves are made."""
    return [replica for replica in placed if replica not in moves.stopped] + list(moves.started)


sizes_of = st.fixed_dictionaries({name: st.sampled_from([1, 2, 4]) for name in "abc"})
wanted_of = st.fixed_dictionaries({name: st.integers(0, 4) for name in "abc"})


@given(
    sizes_of, st.lists(wanted_of, min_size=1, max_size=5), st.integers(4, 14), st.sets(st.integers(0, 13), max_size=3)
)
def test_every_unit_has_one_owner_and_gangs_are_aligned(
    sizes: dict[str, int], targets: list[dict[str, int]], num_units: int, down: set[int]
) -> None:
    """After every one of a series of moves, whether or not everything wanted fits."""
    placed: list[Placed] = []
    for wanted in targets:
        moves = place(placed, wanted, sizes, num_units=num_units, down=frozenset(down))
        assert set(moves.stopped) <= set(placed)
        placed = after(placed, moves)
        owners = Counter(unit for replica in placed for unit in replica.units)
        assert max(owners.values(), default=1) == 1
        assert all(unit < num_units and unit not in down for unit in owners)
        assert all(replica.first_unit % replica.num_units == 0 for replica in placed)
        counts = Counter(replica.policy for replica in placed)
        missing = Counter(moves.unplaced)
        assert all(counts[name] + missing[name] == wanted[name] for name in wanted)


class SlowBoard(placement._Board):
    """Looks at every block for every replica."""

    def start_missing(self, policy: str, size: int) -> None:
        while self.missing[policy] > 0:
            self.missing[policy] -= 1
            costs = [(self._cost(policy, first, size), first) for first in range(0, self._num_units - size + 1, size)]
            possible = [(cost, first) for cost, first in costs if cost is not None]
            if not possible:
                self.unplaced.append(policy)
                continue
            _, first = min(possible)
            for replica in self._inside(first, size):
                self._stop(replica)
            self.started.append(Placed(policy, first, size))
            self._owner.update(dict.fromkeys(range(first, first + size), self.started[-1]))


@given(
    st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 4]) for name in "abc"}),
    st.lists(st.fixed_dictionaries({name: st.integers(0, 7) for name in "abc"}), min_size=2, max_size=4),
    st.integers(4, 20),
    st.sets(st.integers(0, 19), max_size=3),
    st.integers(0, 2**30),
)
def test_every_block_is_the_cheapest_there_is(
    sizes: dict[str, int], targets: list[dict[str, int]], num_units: int, down: set[int], seed: int
) -> None:
    """As when all blocks are looked at again for every replica."""
    rng, placed, board = random.Random(seed), list[Placed](), placement._Board
    for wanted in targets:
        moves = place(placed, wanted, sizes, num_units=num_units, down=frozenset(down))
        try:
            placement._Board = SlowBoard  # type: ignore[misc]
            assert moves == place(placed, wanted, sizes, num_units=num_units, down=frozenset(down))
        finally:
            placement._Board = board  # type: ignore[misc]
        placed = [replace(one, running=rng.randrange(64)) for one in after(placed, moves)]


@given(sizes_of, st.fixed_dictionaries({name: st.integers(0, 2) for name in "abc"}))
def test_what_fits_when_all_units_work_is_placed(sizes: dict[str, int], wanted: dict[str, int]) -> None:
    """Also when every unit was taken by single units before, which have to move for the gangs."""
    num_units = 24
    placed = [Placed("a", unit, 1) for unit in range(0, 24, 2)] if sizes["a"] == 1 else []
    assert place(placed, wanted, sizes, num_units=num_units).unplaced == ()


def test_nothing_moves_when_nothing_changes() -> None:
    """What is wanted and there stays where it is."""
    placed = [Placed("a", 0, 1), Placed("b", 2, 2)]
    assert place(placed, {"a": 1, "b": 1}, {"a": 1, "b": 2}, num_units=4) == Moves((), ())


def test_a_free_unit_comes_before_a_taken_one_and_an_idle_replica_before_a_busy_one() -> None:
    """Fewest moves, then the least work lost."""
    placed = [Placed("a", 0, 1, 60), Placed("a", 1, 1, 5), Placed("b", 2, 1)]
    free = place(placed, {"a": 1, "b": 2}, {"a": 1, "b": 1}, num_units=4)
    assert free.started == (Placed("b", 3, 1),)
    assert free.stopped == (placed[1],)

    taken = place(placed, {"a": 1, "b": 2}, {"a": 1, "b": 1}, num_units=3)
    assert taken == Moves((placed[1],), (Placed("b", 1, 1),))


def test_a_gang_makes_a_smaller_replica_move_but_never_a_gang_of_its_size() -> None:
    """Two free units that are no block become one; a wanted gang stays."""
    placed = [Placed("a", 1, 1), Placed("b", 2, 2), Placed("a", 4, 1)]
    moves = place(placed, {"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 2}, num_units=6)
    assert moves.unplaced == ()
    assert {(one.policy, one.first_unit) for one in after(placed, moves)} in (
        {("c", 0), ("b", 2), ("a", 4), ("a", 5)},
        {("c", 4), ("b", 2), ("a", 1), ("a", 0)},
    )

    full = place(placed, {"a": 2, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 2}, num_units=6)
    assert full.unplaced == ("a", "a") or full.unplaced == ("c",)


def test_a_block_that_a_move_has_freed_in_part_is_cheap() -> None:
    """After b has gone from units 2 and 3 for the first gang of a, the second one makes c move alone, not d and e."""
    sizes = {"a": 3, "b": 2, "c": 1, "d": 1, "e": 1}
    placed = [Placed("b", 2, 2), Placed("c", 5, 1), Placed("d", 6, 1), Placed("e", 7, 1)]
    moves = place(placed, {"a": 2, "b": 1, "c": 1, "d": 1, "e": 0}, sizes, num_units=9)
    assert [one.first_unit for one in moves.started if one.policy == "a"] == [0, 3]
