"""Answers as lines for a terminal."""

import textwrap
from collections.abc import Iterator
from typing import Any

from mrl.report.samples.conversations import Said, conversation, fate
from mrl.report.samples.wanted_answers import printable, shown_words

MAX_TEXT_LINES, MAX_MESSAGES = 40, 40
"""Lines of one prompt, answer or message, and messages of one episode; the page has all of them."""
MARGIN, TALK_MARGIN = 10, 12
STAR = "*"


def sample_lines(row: dict[str, Any], width: int) -> Iterator[str]:
    """One answer: what there is to say of it, its prompt, and its text, at most `width` characters wide.

    An episode is told message by message; a star marks what was trained on.
    """
    yield shown_words(row)
    if said := conversation(row):
        yield from _talk(row, said, width)
    else:
        yield from _told("prompt", str(row.get("prompt", "")), width)
        yield from _told("answer", str(row.get("completion", "")), width)
    yield ""


def _talk(row: dict[str, Any], said: list[Said], width: int) -> Iterator[str]:
    for name in ("prompt", "opening"):
        if text := str(row.get(name) or "").rstrip("\n"):
            yield from _told(name, text, width, margin=TALK_MARGIN)
    for one in said[:MAX_MESSAGES]:
        lines = [f"[{one.tool}] {one.text}" if one.tool else one.text] if one.text or not one.calls else []
        text = "\n".join([*lines, *(f"-> {call}" for call in one.calls)])
        text += " (behind the last turn, not in the row)" * one.is_behind
        yield from _told(one.role, text, width, mark=STAR if one.is_sampled else "", margin=TALK_MARGIN)
    if len(said) > MAX_MESSAGES:
        yield f"  [... {len(said) - MAX_MESSAGES} more messages]"
    given = sum(one.tokens or 0 for one in said if not one.is_sampled)
    tokens = "" if row.get("tokens") is None else f": {row['tokens']} tokens; {given} given between them"
    fates = {fate(one._replace(tokens=None), row) for one in said if one.is_sampled}
    yield printable("".join(f"  {STAR} {words}{tokens}" for words in sorted(fates)))


def _told(name: str, text: str, width: int, *, mark: str = "", margin: int = MARGIN) -> Iterator[str]:
    room = max(20, width - margin)
    lines = [part for line in printable(text).split("\n") for part in textwrap.wrap(line, room, **_AS_IT_IS) or [""]]
    if len(lines) > MAX_TEXT_LINES:
        lines = [*lines[:MAX_TEXT_LINES], f"[... {len(lines) - MAX_TEXT_LINES} more lines]"]
    for number, line in enumerate(lines):
        yield f"{mark:<2}{name if number == 0 else '':<{margin - 2}}{line}".rstrip()


_AS_IT_IS: dict[str, Any] = {"replace_whitespace": False, "drop_whitespace": False, "break_on_hyphens": False}
