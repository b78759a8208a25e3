"""Simulated time: calls in the order of when they are due."""

import heapq
from collections.abc import Callable


class Events:
    """A clock that jumps from one event to the next; what is due together happens in the order of its making."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Make `call` this long from now."""
        self._made += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._made, call))

    def every(self, period_s: float, call: Callable[[], object], *, first_s: float = 0.0) -> None:
        """Make `call` again and again, for the first time `first_s` from now."""

        def again() -> None:
            call()
            self.after(period_s, again)

        self.after(first_s, again)

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due by then."""
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._due)
            call()
        self.now_s = end_s
