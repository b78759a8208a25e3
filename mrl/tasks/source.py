"""The protocol of a source of tasks, and its items."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Part = Literal["held_out", "train", "warm_start"]
Turn = tuple[str, str]
"""Role and content of one message of a conversation."""


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a data set.

    `subject` is the word that the prompt is about ("" when it has none), `letter` the letter asked for in counting
    tasks ("" otherwise), `number` the entry's place in its data set, with which `Source.score` finds it again,
    `reference` the right answer where the data set states one, `part` the part of the data to which the data set itself
    assigns the entry (None leaves it to the hash of subject or text), and `row` the row of a file as JSON.

    Example: `Item('How many times does the letter "s" appear in the text: "bus"?', "bus", "s", 17)`.
    """

    text: str
    subject: str
    letter: str
    number: int
    reference: str = ""
    part: Part | None = None
    row: str = ""
    turns: tuple[Turn, ...] = ()
    """Messages of a prompt that is a conversation, which `text` then shows; empty for any other prompt."""


class Source(Protocol):
    """A data set opened once, with its scorer."""

    is_finite: bool
    """Whether the source holds a fixed number of entries, or makes as many as are asked for."""
    verifier: str
    """"module:function" of a scorer that may hang, die or eat memory, and therefore runs in processes of its own.

    It is called with (`verifier_reference`, extracted answer). "" when `score` is quick and safe. A task's own verifier
    replaces it, and is called with (`item.reference`, extracted answer), and prompt and row where it takes them.
    """

    evaluates: bool
    """Whether the scorer evaluates answers as code, and therefore needs a host that can seal a process."""

    def items(self, limit: int) -> Iterator[Item]:
        """Yield the first `limit` entries of an endless source, or all of a finite one. Prompts may repeat."""
        ...

    def extract(self, completion: str) -> str:
        """Return the part of a completion that is scored; "" when it gives no answer."""
        ...

    def verifier_reference(self, item: Item) -> str:
        """Return the text that `verifier` gets beside an answer."""
        ...

    def score(self, item: Item, answer: str) -> float:
        """Return the data set's own score of an extracted answer, 1.0 if right. Not called where `verifier` is set."""
        ...
