"""Guess a number within some turns; each wrong guess is answered by "higher" or "lower".

A player who halves the remaining range always wins with the default of 15 numbers and 4 turns. A player who ignores the
answers wins one time in four.
"""

import random

from mrl.tasks.extract import tagged_answer


class HigherLower:
    """A text game. The reward is 1 for finding the number, else 0."""

    def reset(self, seed: int, numbers: int = 15, turns: int = 4) -> str:
        """Draw a number from 1 to `numbers` by the seed, and allow `turns` guesses; return the question."""
        self._number = random.Random(f"higher_lower/{seed}").randint(1, numbers)
        self._left, self._found = turns, False
        return f"Guess a number from 1 to {numbers}."

    def step(self, text: str) -> tuple[str, bool]:
        """Return the answer to a guess, and whether the game is over. A text without a number costs a turn, too."""
        self._left -= 1
        guess = tagged_answer(text)
        is_number = guess.isascii() and guess.isdigit() and len(guess) < 10
        self._found = is_number and int(guess) == self._number
        if self._found:
            return "right", True
        said = "no number" if not is_number else "higher" if int(guess) < self._number else "lower"
        return said, self._left == 0

    def get_reward(self) -> float:
        """Return 1 if the number was found, else 0."""
        return float(self._found)
