"""A number stands in a table that only a tool reads; without the tool an answer is right one time in 90.

Few answers are right by luck, so that a policy which imitates a peer's right answers learns to look.
"""

import random
import string

from mrl.tasks.extract import tagged_answer

KEYS = 6
NUMBERS = 10, 99
"""Smallest and largest number."""


class Lookup:
    """A table of words and numbers, drawn by the seed. The reward is 1 for the number asked for, else 0."""

    def reset(self, seed: int) -> str:
        """Draw the table by the seed, and return a question that names one of its words."""
        rng = random.Random(f"lookup/{seed}")
        words = ["".join(rng.choices(string.ascii_lowercase, k=2)) for _ in range(KEYS)]
        self._table = {word: str(rng.randint(*NUMBERS)) for word in words}
        self._asked = rng.choice(words)
        return f"Look up this word: {self._asked}"

    def lookup(self, key: str) -> str:
        """Reads the table.

        Args:
            key: The word to look up.
        """
        return self._table.get(key, "nothing")

    def get_reward(self, answer: str = "") -> float:
        """Return 1 for the right number, else 0."""
        return float(tagged_answer(answer) == self._table[self._asked])
