"""Guess a number within some turns; each wrong guess is answered by "higher" or "lower".

Whoever halves what is left always wins with the default: 15 numbers, 4 turns. Whoever does not listen wins one time in
four.
"""

import random

from mrl.tasks.extract import tagged_answer


class HigherLower:
    """A text game. The reward is 1 for the number, else 0."""

    def reset(self, seed: int, numbers: int = 15, turns: int = 4) -> str:
        """A number from 1 to `numbers`, drawn by the seed, and so many guesses."""
        self._number = random.Random(f"higher_lower/{seed}").randint(1, numbers)
        self._left, self._found = turns, False
        return f"Guess a number from 1 to {numbers}."

    def step(self, text: str) -> tuple[str, bool]:
        """What is said to a guess; a text without a number is answered, and costs a turn."""
        self._left -= 1
        guess = tagged_answer(text)
        is_number = guess.isascii() and guess.isdigit() and len(guess) < 10
        self._found = is_number and int(guess) == self._number
        if self._found:
            return "right", True
        said = "no number" if not is_number else "higher" if int(guess) < self._number else "lower"
        return said, self._left == 0

    def get_reward(self) -> float:
        """1 for the number that was sought."""
        return float(self._found)
