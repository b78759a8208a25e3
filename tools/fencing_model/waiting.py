"""Who may wait for whom: learners that share one rollout slot and feed each other, and every order in which they can.

A state is the slot's holder, every learner's own batches, what peers sent it, who is alive, and who has stepped since
its grant. Deadlock: nothing can happen any more. Trap: some learner lives and can never step again.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from fencing_model.search import backwards

CAPACITY = 2
"""Own batches of a learner; items in an inbox, or in the pool that all share."""


@dataclass(frozen=True)
class Habits:
    """How learners and the allocator behave."""

    peers: Literal["block", "never"]
    """A step needs an item of every peer, or takes what is there."""
    lease: Literal["timed", "until own step"]
    publish: Literal["rollout", "step"] = "rollout"
    pool: Literal["ring", "shared"] = "ring"
    """A bounded inbox per pair that drops the oldest, or one bounded pool that refuses."""
    crash: bool = False
    """One learner may die."""
    num_learners: int = 2


MRL = Habits("never", "timed", crash=True)
WAITS = (
    Habits("block", "until own step"),
    Habits("block", "timed", publish="step"),
    Habits("block", "timed", pool="shared"),
    Habits("never", "timed", pool="shared"),
    Habits("block", "timed", crash=True),
    Habits("never", "until own step", crash=True),
    Habits("block", "timed"),
    MRL,
    Habits("never", "timed", crash=True, num_learners=3),
)
"""What the tool shows: what mrl does, for two learners and for three, and what it does not do."""


class State(NamedTuple):
    """Everything; `inbox[i][j]` holds what i got from j."""

    holder: int
    own: tuple[int, ...]
    inbox: tuple[tuple[int, ...], ...]
    alive: tuple[bool, ...]
    stepped: tuple[bool, ...]


@dataclass(frozen=True)
class Outcome:
    """What the search found."""

    num_states: int
    num_deadlocks: int
    num_trapped: int
    """States in which a learner lives that can never step again."""

    @property
    def is_live(self) -> bool:
        """Whether everybody who lives can always step again."""
        return not (self.num_deadlocks or self.num_trapped)


def explore(habits: Habits) -> Outcome:
    """Every reachable state, then backwards from every step of every learner."""
    size = habits.num_learners
    first = State(-1, (0,) * size, ((0,) * size,) * size, (True,) * size, (False,) * size)
    numbers, states = {first: 0}, [first]
    before: list[list[int]] = [[]]
    steppers: list[set[int]] = [set() for _ in range(size)]
    queue, deadlocks = deque([0]), 0
    while queue:
        here = queue.popleft()
        found = list(_after(states[here], habits))
        deadlocks += not found
        for stepper, state in found:
            there = numbers.setdefault(state, len(states))
            if there == len(states):
                states.append(state)
                before.append([])
                queue.append(there)
            before[there].append(here)
            if stepper >= 0:
                steppers[stepper].add(here)
    reach = [backwards(steps, before) for steps in steppers]
    trapped = sum(
        any(state.alive[who] and number not in reach[who] for who in range(size)) for number, state in enumerate(states)
    )
    return Outcome(len(states), deadlocks, trapped)


def _after(state: State, habits: Habits) -> Iterator[tuple[int, State]]:
    """Every next state, with who steps into it or -1."""
    learners, holder = range(habits.num_learners), state.holder
    if holder < 0:
        for who in learners:
            if state.own[who] < CAPACITY:
                yield -1, state._replace(holder=who, stepped=_put(state.stepped, who, False))
    elif habits.lease == "timed" or state.stepped[holder]:
        yield -1, state._replace(holder=-1)
    if holder >= 0 and state.own[holder] < CAPACITY:
        rolled = state._replace(own=_put(state.own, holder, state.own[holder] + 1))
        published = _publish(rolled, holder, habits) if habits.publish == "rollout" else rolled
        if published:
            yield -1, published
    for who in learners:
        stepped = _step(state, who, habits)
        if stepped:
            yield who, stepped
    if habits.crash and all(state.alive):
        yield -1, state._replace(alive=_put(state.alive, 0, False))


def _step(state: State, who: int, habits: Habits) -> State | None:
    got = state.inbox[who]
    peers = [peer for peer in range(habits.num_learners) if peer != who]
    if not (state.alive[who] and state.own[who]) or (habits.peers == "block" and not all(got[peer] for peer in peers)):
        return None
    left = tuple(max(0, items - 1) for items in got)
    after = state._replace(
        own=_put(state.own, who, state.own[who] - 1),
        inbox=_put(state.inbox, who, left),
        stepped=_put(state.stepped, who, True),
    )
    return _publish(after, who, habits) if habits.publish == "step" else after


def _publish(state: State, who: int, habits: Habits) -> State | None:
    """One item to every peer; None where a full pool refuses."""
    peers = [peer for peer in range(habits.num_learners) if peer != who]
    if habits.pool == "shared" and sum(map(sum, state.inbox)) + len(peers) > CAPACITY:
        return None
    inbox = state.inbox
    for peer in peers:
        inbox = _put(inbox, peer, _put(inbox[peer], who, min(CAPACITY, inbox[peer][who] + 1)))
    return state._replace(inbox=inbox)


T = TypeVar("T")


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
