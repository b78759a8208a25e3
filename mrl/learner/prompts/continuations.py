"""Continuations, states of peers' episodes from which workers sample groups: the learner's books of regime `prefix`.

Each continuation has a place before the policy's pass over the prompts, from `FIRST_CONTINUATION` on, in the order in
which they were handed out. With a place it is work like any other: granted, lost, granted again, given up. It is
granted before the next prompt of the pass and takes that prompt's part of the batch. So no more continuations wait than
groups may run: each batch that is trained on hands out fewer than it holds groups.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mrl.records.rollouts import FIRST_CONTINUATION, Continuation


@dataclass
class Continuations:
    """Continuations by place, as long as they are neither trained on nor given up. Not thread-safe."""

    next_place: int = FIRST_CONTINUATION
    _open: dict[int, Continuation] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_entered(self) -> int:
        """Number of continuations that were ever handed out."""
        return self.next_place - FIRST_CONTINUATION

    def enter(self, found: Sequence[Continuation]) -> list[int]:
        """Take in continuations; return their places."""
        places = list(range(self.next_place, self.next_place + len(found)))
        self._open.update(zip(places, found, strict=True))
        self.next_place += len(found)
        return places

    def at(self, place: int) -> Continuation | None:
        """Return the continuation of a place; None for a place of the pass over the prompts."""
        return self._open.get(place)

    def keep(self, places: Collection[int]) -> None:
        """Keep the continuations of these places, and forget the others: their groups are trained on, or given up."""
        self._open = {place: one for place, one in self._open.items() if place in places}

    def state(self) -> dict[str, Any]:
        """Return its part of a checkpoint, as plain JSON values."""
        return {
            "next": self.next_place,
            "open": [[place, msgspec.to_builtins(one)] for place, one in self._open.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.next_place = state["next"]
        self._open = {place: msgspec.convert(one, Continuation) for place, one in state["open"]}
