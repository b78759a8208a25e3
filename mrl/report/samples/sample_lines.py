"""Answers as lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from mrl.report.samples.answer_filter import printable, shown_words
from mrl.report.samples.conversations import ShownMessage, conversation, fate

MAX_TEXT_LINES, MAX_MESSAGES = 40, 40
"""Most lines of one prompt, answer or message, and most messages of one episode. `sample_page` has no such bounds."""
MARGIN, TALK_MARGIN = 10, 12
STAR, LEFT_OUT = "*", " [...]"


def sample_lines(row: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of one answer: a summary, then its prompt and its text in lines of `width` terminal cells.

    An episode is shown message by message; a star marks messages that a policy sampled.
    """
    yield shown_words(row)
    if said := conversation(row):
        yield from _talk(row, said, width)
    else:
        yield from _told("prompt", str(row.get("prompt", "")), width)
        yield from _told("answer", str(row.get("completion", "")), width)
    yield ""


def talk_within(row: dict[str, Any], width: int, height: int) -> list[str]:
    """Return an episode in at most `height` lines: long messages are cut first, then middle ones are left out."""
    said = conversation(row)
    blocks = [*_opening(row, ("opening",), width), *(_message(one, width) for one in said)]
    room = max(1, height - 1)
    most = next(
        (most for most in range(MAX_TEXT_LINES, 1, -1) if sum(min(len(one), most) for one in blocks) <= room), 1
    )
    lines = [
        line
        for block in blocks
        for line in (block if len(block) <= most else [*block[: most - 1], _cut(block[most - 1], width)])
    ]
    if len(lines) > room:
        num_kept = max(0, room - 2)
        lines = [lines[0], f"  [... {len(lines) - 1 - num_kept} more messages]", *lines[len(lines) - num_kept :]]
    return [*lines[:room], _mask(row, said)][:height]


def _talk(row: dict[str, Any], said: list[ShownMessage], width: int) -> Iterator[str]:
    for block in (*_opening(row, ("prompt", "opening"), width), *(_message(one, width) for one in said[:MAX_MESSAGES])):
        yield from block
    if len(said) > MAX_MESSAGES:
        yield f"  [... {len(said) - MAX_MESSAGES} more messages]"
    yield _mask(row, said)


def _opening(row: dict[str, Any], names: Sequence[str], width: int) -> Iterator[list[str]]:
    for name in names:
        if text := str(row.get(name) or "").rstrip("\n"):
            yield list(_told(name, text, width, margin=TALK_MARGIN))


def _message(said: ShownMessage, width: int) -> list[str]:
    lines = [f"[{said.tool}] {said.text}" if said.tool else said.text] if said.text or not said.calls else []
    text = "\n".join([*lines, *(f"-> {call}" for call in said.calls)])
    text += " (a new row begins here)" * (said.begins_row and not said.is_rewritten)
    text += " (a new row begins here, rewritten by the agent)" * (said.begins_row and said.is_rewritten)
    text += " (after the last turn, not in the row)" * said.is_behind
    return list(_told(said.role, text, width, mark=STAR if said.is_sampled else "", margin=TALK_MARGIN))


def _mask(row: dict[str, Any], said: list[ShownMessage]) -> str:
    given = sum(one.tokens or 0 for one in said if not one.is_sampled)
    tokens = "" if row.get("tokens") is None else f": {row['tokens']} tokens; {given} given between them"
    tokens += ", including the beginnings of rows" * (bool(tokens) and any(one.begins_row for one in said))
    fates = {fate(one._replace(tokens=None), row) for one in said if one.is_sampled}
    return printable("".join(f"  {STAR} {words}{tokens}" for words in sorted(fates)))


def _cut(line: str, width: int) -> str:
    kept = Text(line)
    kept.truncate(width - len(LEFT_OUT), overflow="crop")
    return f"{kept}{LEFT_OUT}"


def _told(name: str, text: str, width: int, *, mark: str = "", margin: int = MARGIN) -> Iterator[str]:
    room = max(20, width - margin)
    lines = [line.plain for line in Text(printable(text)).wrap(Console(width=room), room, overflow="fold")]
    if len(lines) > MAX_TEXT_LINES:
        lines = [*lines[:MAX_TEXT_LINES], f"[... {len(lines) - MAX_TEXT_LINES} more lines]"]
    for number, line in enumerate(lines):
        yield f"{mark:<2}{name if number == 0 else '':<{margin - 2}}{line}".rstrip()
