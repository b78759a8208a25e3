"""Waits between roles, read from heartbeats, and circles of roles that wait for each other."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mrl.records.telemetry_messages import HeartbeatRecord

STEADY_S = 30.0
"""A shorter wait does not count: a message on its way may end it, on a slow machine too."""
FRESH_S = 5.0
"""An older heartbeat does not count."""


def wait_cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Names of a circle: each waits for the next, and the last for the first. Empty if there is no circle.

    The result does not depend on the order of the edges (waiter, awaited).
    """
    awaited: dict[str, list[str]] = {}
    for waiter, name in sorted(set(edges)):
        awaited.setdefault(waiter, []).append(name)
    done: set[str] = set()
    for start in awaited:
        path: dict[str, Iterator[str]] = {} if start in done else {start: iter(awaited[start])}
        while path:
            here = next(reversed(path))
            onward = next(path[here], None)
            if onward is None:
                del path[here]
                done.add(here)
            elif onward in path:
                names = list(path)
                return _from_smallest(names[names.index(onward) :])
            elif onward not in done:
                path[onward] = iter(awaited.get(onward, ()))
    return []


class Wait(NamedTuple):
    """A wait of a role: its subject, its start, and the time of the last heartbeat. Without a wait `whom` is empty."""

    what: str
    whom: str
    since_unix_s: float
    heard_unix_s: float


def wait_edges(waits: Mapping[str, Wait], now_unix_s: float) -> list[tuple[str, str]]:
    """Edges (waiter, awaited) of all roles with a long wait; `waits` holds the newest wait of each role.

    A name like "worker/qwen" stands for all workers of the policy: a wait for it is a wait for any worker, and counts
    only if all workers wait too.
    """
    waiting = {
        role
        for role, wait in waits.items()
        if wait.whom and now_unix_s - wait.since_unix_s >= STEADY_S and now_unix_s - wait.heard_unix_s <= FRESH_S
    }
    edges: list[tuple[str, str]] = []
    for role in waiting:
        for name in waits[role].whom.split(", "):
            members = [other for other in waits if other == name or other.startswith(f"{name}/")]
            if members and waiting.issuperset(members):
                edges += [(role, member) for member in members]
    return edges


class WaitWatch:
    """Takes heartbeats in and names every new circle once."""

    def __init__(self) -> None:
        self._waits: dict[str, Wait] = {}
        self._told: list[str] = []

    def note(self, beat: HeartbeatRecord) -> str:
        """Take one heartbeat; returns a line when a circle is there that was not there before, else nothing."""
        now_unix_s, before = beat.time_unix_s, self._waits.get(beat.role)
        since_unix_s = now_unix_s - beat.for_s
        if before and (before.what, before.whom) == (beat.awaiting, beat.whom):
            since_unix_s = min(since_unix_s, before.since_unix_s)  # a wait in slices is one wait
        self._waits[beat.role] = Wait(beat.awaiting, beat.whom if beat.awaiting else "", since_unix_s, now_unix_s)
        cycle = wait_cycle(wait_edges(self._waits, now_unix_s))
        is_new, self._told = bool(cycle) and cycle != self._told, cycle
        if not is_new:
            return ""
        parts = [f"{role} for {self._waits[role].what} of {self._waits[role].whom}" for role in cycle]
        return "they wait for each other: " + ", ".join(parts)


def _from_smallest(cycle: list[str]) -> list[str]:
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
