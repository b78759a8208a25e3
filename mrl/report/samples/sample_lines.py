"""Answers as lines for a terminal."""

import textwrap
from collections.abc import Iterator
from typing import Any

from mrl.report.samples.wanted_answers import printable, shown_words

MAX_TEXT_LINES = 40
"""Of one prompt or answer; the page has all of them."""
MARGIN = 10


def sample_lines(row: dict[str, Any], width: int) -> Iterator[str]:
    """One answer: what there is to say of it, its prompt, and its text, at most `width` characters wide."""
    yield shown_words(row)
    for name, key in (("prompt", "prompt"), ("answer", "completion")):
        yield from _told(name, printable(str(row.get(key, ""))), max(20, width - MARGIN))
    yield ""


def _told(name: str, text: str, width: int) -> Iterator[str]:
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, width, **_AS_IT_IS) or [""]]
    if len(lines) > MAX_TEXT_LINES:
        lines = [*lines[:MAX_TEXT_LINES], f"[... {len(lines) - MAX_TEXT_LINES} more lines]"]
    for number, line in enumerate(lines):
        yield f"  {name if number == 0 else '':<{MARGIN - 2}}{line}".rstrip()


_AS_IT_IS: dict[str, Any] = {"replace_whitespace": False, "drop_whitespace": False, "break_on_hyphens": False}
