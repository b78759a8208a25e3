"""Word tasks generated here, in the style of reasoning-gym: one operation on one short word per data set."""

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.errors import TaskError
from mrl.tasks.extract import tagged_answer
from mrl.tasks.operations import OPERATIONS, check_name
from mrl.tasks.source import Item

TEMPLATES: dict[str, str] = {
    "reverse": "Spell this word from its end (example: sun -> nus): {}",
    "capital": "Write this word in capitals (example: sun -> SUN): {}",
    "trim": "Remove the first letter of this word (example: sun -> un): {}",
    "double": "Write the first letter of this word twice (example: sun -> ssun): {}",
    "swap": "Swap the first two letters of this word (example: sun -> usn): {}",
    "rotate": "Move the first letter of this word to the end (example: sun -> uns): {}",
    "front": "Move the last letter of this word to the front (example: sun -> nsu): {}",
}
DEFAULTS: dict[str, int] = {"min_letters": 3, "max_letters": 4}
CAPITALISED_SHARE = 0.2


class WordSource:
    """Endless words of random letters, one prompt each; entry `i` depends only on seed and `i`."""

    is_finite = False
    verifier = ""
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """Raises TaskError for an unknown data set, an unknown option or impossible lengths."""
        check_name(dataset, TEMPLATES, "word data set does not exist", where=where)
        for option in options:
            check_name(option, DEFAULTS, f"data set {dataset!r} has no such option", where=where)
        lengths = DEFAULTS | dict(options)
        self._min_letters, self._max_letters = lengths["min_letters"], lengths["max_letters"]
        if not all(isinstance(n, int) for n in lengths.values()) or not 2 <= self._min_letters <= self._max_letters:
            wanted = "whole numbers with 2 <= min_letters <= max_letters"
            raise TaskError("invalid lengths of words", where=where, got=lengths, wanted=wanted)
        self._dataset, self._seed = dataset, seed

    def items(self, limit: int) -> Iterator[Item]:
        """Yield the first `limit` prompts."""
        for number in range(limit):
            word = self._word(number)
            reference = OPERATIONS[self._dataset](word, "")
            yield Item(TEMPLATES[self._dataset].format(word), word, "", number, reference)

    def extract(self, completion: str) -> str:
        """Return the content of the answer's tags."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """Return the right answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """Return 1.0 for exactly the right text, else 0.0."""
        return 1.0 if answer.strip() == item.reference else 0.0

    def _word(self, number: int) -> str:
        rng = random.Random(f"{self._seed}/{self._dataset}/{number}")
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(self._min_letters, self._max_letters))
        word = "".join(letters)
        return word.capitalize() if rng.random() < CAPITALISED_SHARE else word
