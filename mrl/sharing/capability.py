"""How able each policy is now: the mean reward of its last steps, and their ratios (HACPO, arXiv 2603.02604)."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

FLOOR = 1e-8
RATIO_BOUNDS = (0.1, 10.0)


class Capabilities:
    """Per policy, the batch mean rewards of its last `window_steps` steps that had any."""

    def __init__(self, *, window_steps: int) -> None:
        self._window_steps = window_steps
        self._means: dict[str, deque[float]] = {}

    def note(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """The rewards of one step by policy; a policy without rewards keeps its window."""
        for policy, seen in rewards.items():
            if len(seen):
                window = self._means.setdefault(policy, deque(maxlen=self._window_steps))
                window.append(sum(seen) / len(seen))

    def of(self, policy: str) -> float | None:
        """Mean over the window; None before the first step."""
        window = self._means.get(policy)
        return sum(window) / len(window) if window else None

    def ratio(self, policy: str, other: str) -> float:
        """omega = P(policy) / P(other), floored and held in [0.1, 10] as the authors' code does; 1 while unknown."""
        own, others = self.of(policy), self.of(other)
        if own is None or others is None:
            return 1.0
        low, high = RATIO_BOUNDS
        return min(high, max(low, max(own, FLOOR) / max(others, FLOOR)))

    def state(self) -> dict[str, Any]:
        """The windows as JSON values."""
        return {policy: list(window) for policy, window in self._means.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self._means = {policy: deque(means, maxlen=self._window_steps) for policy, means in state.items()}
