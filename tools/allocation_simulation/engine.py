"""A replica. All its requests advance at one rate, which falls with their number (processor sharing)."""

import heapq
from dataclasses import dataclass
from itertools import count

_numbers = count()


@dataclass(slots=True)
class Group:
    """The answers to one prompt. `behaviour` is the policy's version when the group was let in."""

    behaviour: int
    missing: int
    tokens: float


@dataclass(slots=True)
class Request:
    """One answer: its length and the part of it that is left to generate, in tokens."""

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
        """Number of requests that run at once at most."""
        self.serving_from_s = serving_from_s
        """Time at which the engine begins to serve; it wakes up until then."""
        self.running: list[tuple[float, int, Request]] = []
        """Heap of (work at which the request ends, number, request)."""
        self.work = 0.0
        """Tokens that a request has generated if it has run since the engine began to serve."""
        self.advanced_s = self.worked_s = serving_from_s
        self.active_s = self.request_s = self.tokens = 0.0
        """Totals: seconds with a request running, time integral of running requests, tokens."""
        self.stamp = 0
        """Number of the replica's newest planned event; older ones do not count."""

    @property
    def units(self) -> range:
        """Units on which the replica runs."""
        return range(self.first_unit, self.first_unit + self.num_units)

    def advance(self, now_s: float) -> None:
        """Generate tokens until now."""
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
        """Start a request; the replica has been advanced to now."""
        heapq.heappush(self.running, (self.work + request.left, next(_numbers), request))

    def next_end_s(self) -> float:
        """Time at which the first of the requests ends, if nothing changes."""
        slowness = self.token_s + self.per_request_s * len(self.running)
        return self.worked_s + max(0.0, self.running[0][0] - self.work) * slowness

    def ended(self) -> list[Request]:
        """Remove and return the requests that have ended."""
        done = []
        while self.running and self.running[0][0] <= self.work + 1e-6:
            done.append(heapq.heappop(self.running)[2])
        return done

    def forget(self, groups: set[int]) -> bool:
        """Remove the answers to groups given by `id(group)`; return whether there were any. Call `advance` before."""
        before = len(self.running)
        self.running = [entry for entry in self.running if id(entry[2].group) not in groups]
        heapq.heapify(self.running)
        return len(self.running) < before

    def evict(self, *, keep_tokens: bool, rework: float) -> list[Request]:
        """Remove and return all running requests.

        With `keep_tokens` their tokens are kept, but for the share `rework`, which has to be generated again; without
        it they start anew.
        """
        taken = []
        for end, _, request in sorted(self.running):
            left = max(0.0, end - self.work)
            generated = request.length - left
            request.left = left + rework * generated if keep_tokens else request.length
            taken.append(request)
        self.running.clear()
        return taken
