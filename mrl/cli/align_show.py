"""`mrl align show`: one text in two tokenizers' tokens, common spans below each other, and characters changed."""

import unicodedata
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mrl.alignment.pair_card import SpanText, span_texts, translated
from mrl.alignment.receiver import Receiver

SAME = ("black on bright_cyan", "black on bright_yellow")
DIFFERENT, REWRITTEN = "white on red", "black on bright_magenta"
MAX_CHANGES = 6
DOTTED_CIRCLE = "\u25cc"
REFUSALS = {
    "empty": "the text is empty",
    "utf8": "the text is not valid UTF-8",
    "special_out": "the text would become a special token",
    "bytes_differ": "its tokens decode to different bytes",
    "size": "the text is too large",
}

Lines = tuple[Text, Text]
"""A line of tokens of the first tokenizer, and the line below it of the second."""


def show(console: Console, names: tuple[str, str], receivers: tuple[Receiver, Receiver], words: str) -> None:
    """Print `words` as an answer in tokens of the first tokenizer, and that answer in tokens of the second."""
    answers, batch = translated(*receivers, [words])
    written = answers[0].completion.decode("utf-8", "replace")
    _tell(console, f"{names[0]} changes characters of the given text", words, written)
    reason = batch.reject_reason[0]
    if reason:
        why = REFUSALS.get(reason)
        console.print(f"{names[1]} cannot express this text: {reason}{f', {why}' if why else ''}")
        return
    spans = span_texts(answers[0], batch, 0, receivers[1])
    read = b"".join(piece for span in spans for piece in span.receiver).decode("utf-8", "replace")
    _tell(console, f"{names[1]} changes characters of {names[0]}'s text", written, read)
    width = max(map(cell_len, names))
    for number, lines in enumerate(wrapped(spans, console.width - width - 2)):
        if number:
            console.print()
        for name, line in zip(names, lines, strict=True):
            console.print(Text(name + " " * (width - cell_len(name) + 2)) + line, soft_wrap=True)
    console.print(_key(spans, coloured=console.is_terminal and not console.no_color), style="dim")


def visible(data: bytes) -> str:
    """Return a token's bytes as visible text: spaces and line ends marked, parts of characters in hexadecimal.

    A combining mark at the beginning, which would stand on the letter before the token, stands on a dotted circle.
    """
    words = data.decode(errors="backslashreplace")
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
    shown = "".join(marks.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in words)
    return DOTTED_CIRCLE + shown if words and unicodedata.combining(words[0]) else shown


def wrapped(spans: Sequence[SpanText], width: int) -> Iterator[Lines]:
    """Yield both sides in lines of at most `width` cells, unless a span is wider; spans stand below each other.

    Each span has one colour and bars between its tokens: red where the sides differ in tokens, magenta where they
    differ in characters.
    """
    lines, taken = (Text(), Text()), 0
    for index, span in enumerate(spans):
        sides = ["|".join(map(visible, side)) for side in (span.peer, span.receiver)]
        widest = max(map(cell_len, sides))
        if taken and taken + widest > width:
            yield lines
            lines, taken = (Text(), Text()), 0
        for line, side in zip(lines, sides, strict=True):
            line.append(side + " " * (widest - cell_len(side)), style=_style(span, index))
            line.append(" ")
        taken += widest + 1
    if taken:
        yield lines


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Return the pieces that differ, (before, after), in order.

    >>> changes("cafe\\u0301 \\u2581", "caf\\u00e9  ")
    [('é', 'é'), ('▁', ' ')]
    """
    steps = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(before[a:b], after[c:d]) for kind, a, b, c, d in steps if kind != "equal"]


def _style(span: SpanText, index: int) -> str:
    if span.is_rewritten:
        return REWRITTEN
    return SAME[index % len(SAME)] if span.is_one_to_one else DIFFERENT


def _tell(console: Console, what: str, before: str, after: str) -> None:
    """Print one line on the changes between two texts; nothing where the texts are equal."""
    if before == after:
        return
    found = changes(before, after)
    told = [f"{_spelled(old)} became {_spelled(new)}" for old, new in found[:MAX_CHANGES]]
    more = [f"and {len(found) - MAX_CHANGES} more"] if len(found) > MAX_CHANGES else []
    form = " (NFC)" if unicodedata.normalize("NFC", before) == after else ""
    console.print(Text(f"{what}{form}: {'; '.join([*told, *more])}"), style="bold", soft_wrap=True)


def _spelled(characters: str) -> str:
    """Return characters with their code points, since two forms of one letter look alike."""
    codes = " ".join(f"U+{ord(character):04X}" for character in characters)
    return f"{visible(characters.encode())} [{codes}]" if characters else "nothing"


def _key(spans: Sequence[SpanText], *, coloured: bool) -> str:
    one = sum(span.is_one_to_one for span in spans)
    words = [f"{len(spans)} common spans, {one} of them 1:1", "bars separate the tokens of one span"]
    if coloured and one < len(spans):
        words.append("red: different tokens")
    if coloured and any(span.is_rewritten for span in spans):
        words.append("magenta: different characters")
    return "; ".join(words)
