"""A way through some rooms: a draught tells which of four doors goes on, and a wrong door ends the game.

A player who follows the draught always gets out. A player who takes random doors leaves one room in four, and
practically never gets out of all eight: the reward comes late, after turns that all have to be right.
"""

import random

from mrl.tasks.extract import tagged_answer

DOORS = 4


class Maze:
    """A text game. The reward is 1 for getting out, else 0."""

    def reset(self, seed: int, rooms: int = 8) -> str:
        """Draw a way through `rooms` rooms by the seed, and return the text of the first."""
        rng = random.Random(f"maze/{seed}")
        self._way = [str(rng.randint(1, DOORS)) for _ in range(rooms)]
        self._num_passed = 0
        return f"{rooms} rooms. {self._room()}"

    def step(self, text: str) -> tuple[str, bool]:
        """Return the next room's text, and whether the game is over; any text but the right door ends the game."""
        if tagged_answer(text) != self._way[self._num_passed]:
            return "lost", True
        self._num_passed += 1
        is_out = self._num_passed == len(self._way)
        return ("out" if is_out else self._room()), is_out

    def get_reward(self) -> float:
        """Return 1 after the last door, else 0."""
        return float(self._num_passed == len(self._way))

    def _room(self) -> str:
        return f"Draught: {self._way[self._num_passed]}"
