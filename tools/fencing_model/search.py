"""Search that visits every state of a design and counts the forbidden ones."""

from collections import deque
from dataclasses import dataclass

from fencing_model.world import Bounds, Design, Steps, World
from mrl.allocation.unit_leases import OWNED, UnitState


@dataclass(frozen=True)
class Found:
    """States that the search of one design found."""

    design: str
    num_states: int
    num_two_owners: int
    """States in which two engines that may act are on the unit."""
    num_intruders: int
    """States in which an engine that may act is on the unit and does not own it: the unit is free, or another's."""
    num_lost: int
    """States with a grant left from which no engine ever starts again."""
    path: tuple[World, ...] = ()
    """Shortest path of states to the first forbidden one; empty if there is none."""

    @property
    def is_safe(self) -> bool:
        """Whether no forbidden state was found."""
        return not (self.num_two_owners or self.num_intruders or self.num_lost)


def search(design: Design, bounds: Bounds) -> Found:
    """Visit all states breadth first from the beginning, then backwards from every start of an engine."""
    steps = Steps(design, bounds)
    numbers = {World(): 0}
    worlds, came_from = [World()], [0]
    before: list[list[int]] = [[]]
    """For each state, the states that lead to it."""
    starts: set[int] = set()
    queue = deque([0])
    while queue:
        here = queue.popleft()
        for event, world in steps.after(worlds[here]):
            there = numbers.setdefault(world, len(worlds))
            if there == len(worlds):
                worlds.append(world)
                came_from.append(here)
                before.append([])
                queue.append(there)
            if there != here:
                before[there].append(here)
            if event == "start":
                starts.add(here)
    alive = backwards(starts, before)
    lost = [number for number, world in enumerate(worlds) if number not in alive and steps.budget_left(world)]
    two = [number for number, world in enumerate(worlds) if sum(one.may_act for one in world.processes) > 1]
    strange = [number for number, world in enumerate(worlds) if has_intruder(world)]
    worst = min((*two, *strange, *lost), default=None)
    path = () if worst is None else tuple(worlds[number] for number in _path(worst, came_from))
    return Found(design.name, len(worlds), len(two), len(strange), len(lost), path)


def has_intruder(world: World) -> bool:
    """Whether an engine may act on a unit that the allocator calls free or gives to another."""
    row, active = world.row, [one for one in world.processes if one.may_act]
    if row.state is UnitState.FREE:
        return bool(active)
    return row.state in OWNED and any(one[:2] != (row.epoch, row.policy) for one in active)


def backwards(targets: set[int], before: list[list[int]]) -> set[int]:
    """Return all states from which one of the targets can be reached."""
    seen, queue = set(targets), deque(targets)
    while queue:
        for number in before[queue.popleft()]:
            if number not in seen:
                seen.add(number)
                queue.append(number)
    return seen


def _path(number: int, came_from: list[int]) -> list[int]:
    path = [number]
    while path[-1]:
        path.append(came_from[path[-1]])
    return path[::-1]
