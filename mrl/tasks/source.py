"""What every source of tasks offers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a data set.

    `subject` is the word that the prompt is about ("" when it has none), `letter` the letter asked for in counting
    tasks ("" otherwise), `number` the entry's place in its data set, with which `Source.score` finds it again.

    Example: `Item('How many times does the letter "s" appear in the text: "bus"?', "bus", "s", 17)`.
    """

    text: str
    subject: str
    letter: str
    number: int


class Source(Protocol):
    """A data set opened once, with its scorer."""

    def items(self, limit: int) -> Iterator[Item]:
        """The first `limit` entries, made one by one; may hold repeated prompts."""
        ...

    def score(self, item: Item, answer: str) -> float:
        """The data set's own score of an extracted answer; 1.0 is right."""
        ...
