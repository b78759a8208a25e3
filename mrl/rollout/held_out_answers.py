"""How many held-out prompts a worker takes beside its groups: before them, within a bounded share of its places.

A worker with places for a single group gives them to held-out prompts and to groups in turns.
"""

from typing import NamedTuple


class InFlight(NamedTuple):
    """Numbers of answers that the engine has been handed and that have not come."""

    of_groups: int
    held_out: int
    plain: int = 0
    """Answers to requests outside of episodes."""


class HeldOutRoom(NamedTuple):
    """Numbers of held-out prompts that may be handed in now."""

    beside: int = 0
    """Prompts in place of as many answers of groups."""
    alone: int = 0
    """Prompts where there are no groups to sample."""


class HeldOutShare:
    """Bounded share of one worker's places for held-out prompts."""

    def __init__(self, share: float, group_size: int) -> None:
        """At most `share` of the places, but at least one place, goes to held-out prompts while there are groups.

        A share below 1 leaves room for a group.
        """
        self._share, self._group_size = share, group_size
        self._had_a_turn = False

    def room(self, max_answers: int, in_flight: InFlight) -> HeldOutRoom:
        """Return how many held-out prompts have room beside the answers in flight."""
        free = max(0, max_answers - in_flight.of_groups - in_flight.held_out)
        alone = 0 if in_flight.of_groups else free
        bound = max(1, int(self._share * max_answers))
        if self._share < 1:
            bound = min(bound, max_answers - self._group_size)
        if bound < 1:
            return HeldOutRoom(0 if self._had_a_turn else alone, alone)
        return HeldOutRoom(max(0, min(free, bound - in_flight.held_out)), alone)

    def departed(self, *, groups: bool) -> None:
        """Note that groups, or held-out prompts alone, were handed in."""
        self._had_a_turn = not groups
