"""TRL's reward function: mrl's verdict on this task in a few lines, as users of TRL write them. Imports nothing."""

from typing import Any


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1.0 where the last `<answer>` of a completion holds the right answer, else 0.0."""
    return [float(_tagged(text) == wanted) for text, wanted in zip(completions, answer, strict=True)]


def _tagged(completion: str) -> str:
    """Return the text in the last tags, or the whole completion if there are none."""
    before, closed, _ = completion.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return (inside if closed and opened else completion).strip()
