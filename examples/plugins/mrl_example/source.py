"""`shout`: a word of random letters, to be written in capitals."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.errors import TaskError
from mrl.tasks.extract import tagged_answer
from mrl.tasks.source import Item


class Shout:
    """Entry `i` depends on the seed and `i` alone, so that all processes have the same prompts."""

    is_finite = False
    verifier = ""
    evaluates = False

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, where: str, get: str = "") -> None:
        """`dataset` holds the letters of the words. Raises TaskError for a length that makes no sense."""
        self._letters, self._length, self._seed = dataset, options.get("length", 3), seed
        if not isinstance(self._length, int) or self._length < 1:
            raise TaskError("no length of a word", where=f"{where}.options.length", got=self._length, wanted=">= 1")

    def items(self, limit: int) -> Iterator[Item]:
        """The first `limit` prompts; `subject` keeps a word on one side of the held-out split."""
        for number in range(limit):
            word = "".join(random.Random(f"{self._seed}/{number}").choices(self._letters, k=self._length))
            yield Item(text=f"Shout: {word}", subject=word, letter="", number=number, reference=word.upper())

    def extract(self, completion: str) -> str:
        """What stands in <answer> tags, or all of the completion."""
        return tagged_answer(completion)

    def verifier_reference(self, item: Item) -> str:
        """What a verifier is given beside an answer."""
        return item.reference

    def score(self, item: Item, answer: str) -> float:
        """1.0 for the right word; not called where the task names a verifier."""
        return float(answer == item.reference)
