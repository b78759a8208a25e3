"""The environment of `bench_episodes.py`: it plays so many turns, and takes its time for each."""

import time


class Paced:
    """A game that nobody can lose; a step waits as one does that asks a service."""

    def reset(self, seed: int, turns: int, pause_s: float) -> str:
        """What it says first has the same length for every seed."""
        self._left, self._pause_s = turns, pause_s
        return f"turn {seed % 10}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """A word, and at the end a reward."""
        time.sleep(self._pause_s)
        self._left -= 1
        return "more", 1.0, self._left == 0
