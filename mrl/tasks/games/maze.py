"""A way through some rooms: a draught tells which of four doors goes on, and a wrong one ends the game.

Whoever follows the draught always gets out. Whoever takes any door leaves one room in four, and never gets out of
all eight: the reward comes late, behind turns that all have to be right.
"""

import random

from mrl.tasks.extract import tagged_answer

DOORS = 4


class Maze:
    """A text game. The reward is 1 for getting out, else 0."""

    def reset(self, seed: int, rooms: int = 8) -> str:
        """The first of so many rooms; the seed draws the way."""
        rng = random.Random(f"maze/{seed}")
        self._way = [str(rng.randint(1, DOORS)) for _ in range(rooms)]
        self._num_passed = 0
        return f"{rooms} rooms. {self._room()}"

    def step(self, text: str) -> tuple[str, bool]:
        """The next room behind the right door; every other text ends the game."""
        if tagged_answer(text) != self._way[self._num_passed]:
            return "lost", True
        self._num_passed += 1
        is_out = self._num_passed == len(self._way)
        return ("out" if is_out else self._room()), is_out

    def get_reward(self) -> float:
        """1 behind the last door."""
        return float(self._num_passed == len(self._way))

    def _room(self) -> str:
        return f"Draught: {self._way[self._num_passed]}"
