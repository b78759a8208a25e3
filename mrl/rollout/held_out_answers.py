"""How many held-out prompts a worker takes beside its groups: before them, within a bounded share of its places.

A worker whose places hold a single group gives them to held-out prompts and to groups in turns.
"""

from typing import NamedTuple


class InFlight(NamedTuple):
    """Answers that the engine has been handed and that have not come."""

    of_groups: int
    held_out: int
    plain: int = 0
    """To requests outside of episodes."""


class HeldOutRoom(NamedTuple):
    """Held-out prompts that may be handed in now."""

    beside: int = 0
    """In place of as many answers of groups."""
    alone: int = 0
    """Where there are no groups to sample."""


class HeldOutShare:
    """The bounded share of one worker."""

    def __init__(self, share: float, group_size: int) -> None:
        """At most `share` of the places, at least one of them, while groups are to be sampled.

        Below 1 it leaves room for a group.
        """
        self._share, self._group_size = share, group_size
        self._had_a_turn = False

    def room(self, max_answers: int, in_flight: InFlight) -> HeldOutRoom:
        """What has room beside what is in flight."""
        free = max(0, max_answers - in_flight.of_groups - in_flight.held_out)
        alone = 0 if in_flight.of_groups else free
        bound = max(1, int(self._share * max_answers))
        if self._share < 1:
            bound = min(bound, max_answers - self._group_size)
        if bound < 1:
            return HeldOutRoom(0 if self._had_a_turn else alone, alone)
        return HeldOutRoom(max(0, min(free, bound - in_flight.held_out)), alone)

    def departed(self, *, groups: bool) -> None:
        """Groups, or held-out prompts alone, were handed in."""
        self._had_a_turn = not groups
