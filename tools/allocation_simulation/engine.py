"""A replica: every request that runs advances at the same rate, which falls with their number (processor sharing)."""

import heapq
from dataclasses import dataclass
from itertools import count

_numbers = count()


@dataclass(slots=True)
class Group:
    """The answers to one prompt, dated when the first was let in."""

    behaviour: int
    missing: int
    tokens: float


@dataclass(slots=True)
class Request:
    """One answer, and what is left to generate of it."""

    group: Group
    length: float
    left: float


class Replica:
    """One engine on its units. `now_s` never goes back."""

    __slots__ = (
        "active_s", "advanced_s", "first_unit", "full", "num_units", "per_request_s", "policy", "request_s", "running",
        "serving_from_s", "stamp", "token_s", "tokens", "work", "worked_s",
    )  # fmt: skip

    def __init__(
        self,
        policy: str,
        first_unit: int,
        num_units: int,
        *,
        line: tuple[float, float],
        full: int,
        serving_from_s: float,
    ) -> None:
        self.policy, self.first_unit, self.num_units = policy, first_unit, num_units
        self.token_s, self.per_request_s = line
        self.full = full
        """Requests that fit."""
        self.serving_from_s = serving_from_s
        """It wakes up until then."""
        self.running: list[tuple[float, int, Request]] = []
        """Heap of (work at which the request ends, number, request)."""
        self.work = 0.0
        """Tokens that a request has got that was there from the start."""
        self.advanced_s = self.worked_s = serving_from_s
        self.active_s = self.request_s = self.tokens = 0.0
        """Totals: time with a request running, integral of running requests, tokens."""
        self.stamp = 0
        """Number of its newest planned event; older ones do not count."""

    @property
    def units(self) -> range:
        """Its units."""
        return range(self.first_unit, self.first_unit + self.num_units)

    def advance(self, now_s: float) -> None:
        """Generate until now."""
        running = len(self.running)
        if running:
            elapsed_s = now_s - self.advanced_s
            if elapsed_s > 0.0:
                self.active_s += elapsed_s
                self.request_s += running * elapsed_s
            worked_s = now_s - self.worked_s
            if worked_s > 0.0:
                work = worked_s / (self.token_s + self.per_request_s * running)
                self.work += work
                self.tokens += running * work
        if now_s > self.advanced_s:
            self.advanced_s = now_s
        if now_s > self.worked_s:
            self.worked_s = now_s

    def pause(self, now_s: float, pause_s: float) -> None:
        """Stand still for new weights; requests stay where they are."""
        self.advance(now_s)
        self.worked_s = max(self.worked_s, now_s) + pause_s

    def add(self, request: Request) -> None:
        """Let a request in; the replica has been advanced to now."""
        heapq.heappush(self.running, (self.work + request.left, next(_numbers), request))

    def next_end_s(self) -> float:
        """When the first of its requests ends, if nothing changes."""
        slowness = self.token_s + self.per_request_s * len(self.running)
        return self.worked_s + max(0.0, self.running[0][0] - self.work) * slowness

    def ended(self) -> list[Request]:
        """Take out what has ended."""
        done = []
        while self.running and self.running[0][0] <= self.work + 1e-6:
            done.append(heapq.heappop(self.running)[2])
        return done

    def forget(self, groups: set[int]) -> bool:
        """Take out the answers to these groups, told by their `id`; whether there were any. Advanced to now before."""
        before = len(self.running)
        self.running = [entry for entry in self.running if id(entry[2].group) not in groups]
        heapq.heapify(self.running)
        return len(self.running) < before

    def evict(self, *, keep_tokens: bool, rework: float) -> list[Request]:
        """Take out all that runs: with what is generated, of which `rework` has to be done again, or without."""
        taken = []
        for end, _, request in sorted(self.running):
            left = max(0.0, end - self.work)
            generated = request.length - left
            request.left = left + rework * generated if keep_tokens else request.length
            taken.append(request)
        self.running.clear()
        return taken
