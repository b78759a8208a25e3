"""A pair card as one SVG file: coverage per kind of text in both directions, the floor, and spans cut differently.

The file stands alone: fonts of the reader's system, light or dark by the reader's preference, no scripts.
"""

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence

from mrl.alignment.exact_tries import Floor, NotMeasurable
from mrl.alignment.pair_card import Coverage, CutExample, Direction, PairCard
from mrl.alignment.residual import KINDS
from mrl.report.number_format import fixed
from mrl.report.svg import svg, text

WIDTH, MARGIN = 1080, 28
PANEL = (WIDTH - 3 * MARGIN) / 2
LABEL, FIGURES, ROW = 92, 118, 30
LABEL_CHARACTERS = 13
COLUMNS = 3
COLUMN = (WIDTH - (COLUMNS + 1) * MARGIN) / COLUMNS
KIND_WORDS = {"one_to_one": "1:1", "one_to_many": "1:n", "many_to_one": "n:1", "many_to_many": "m:n"}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.title { font-size: 20px; font-weight: 650 } .head { font-weight: 650 } .quiet { fill: var(--quiet) }
.mono { font: 13px ui-monospace, monospace } .ground { fill: var(--ground) }
.one_to_one { fill: #0072b2 } .one_to_many { fill: #e69f00 } .many_to_one { fill: #cc79a7 }
.many_to_many { fill: #8a8a8a }
.on { fill: #fff; font-weight: 600 } .on.one_to_many, .on.many_to_one { fill: #1b1f24 }
.empty { fill: none; stroke: var(--line) }
.cell { fill: var(--cell); stroke: var(--line) }
svg { --ink: #1b1f24; --quiet: #5d6670; --line: #c9d0d8; --cell: #eef2f6; --ground: #fff }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8ecf0; --quiet: #9aa5b1; --line: #444d57; --cell: #232a32; --ground: #14181d }
}
"""
CELL_CHARACTER, MAX_CELLS = 8.2, 17
REASON_CHARACTERS = 140
DOTTED_CIRCLE = "\u25cc"


def card_picture(card: PairCard) -> str:
    """The whole picture."""
    title = text(MARGIN, 40, " and ".join(card.names), kind="title")
    if card.is_identity:
        return _file([title, text(MARGIN, 78, "One tokenizer: ids and log-probs pass through untouched.")], 108)
    if card.refusals:
        return _file([title, *_refusals(card)], 112 + 20 * len(_refusals(card)))
    body, height = [title, _key(62)], 90.0
    for index, direction in enumerate(card.directions):
        x = MARGIN + index * (PANEL + MARGIN)
        body += _panel(direction, x, 90)
        height = 90 + 34 + ROW * len(direction.coverage) + 124
    body += _examples(card, height + 26)
    return _file(body, height + 60 + 52 * -(-len(card.examples) // COLUMNS))


def _refusals(card: PairCard) -> list[str]:
    lines = [line for name, why in card.refusals.items() for line in textwrap.wrap(f"{name}: {why}", REASON_CHARACTERS)]
    head = text(MARGIN, 78, "Cannot be aligned exactly", kind="head")
    return [head, *(text(MARGIN, 102 + 20 * number, line) for number, line in enumerate(lines))]


def _file(body: Sequence[str], height: float) -> str:
    ground = f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>'
    drawing = svg(f"<style>{STYLE}</style>{ground}{''.join(body)}", WIDTH, height, "pair card")
    size = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
    return drawing.replace("<svg ", size, 1) + "\n"


def _key(y: float) -> str:
    parts, x = [], float(MARGIN)
    for kind, words in KIND_WORDS.items():
        parts.append(f'<rect class="{kind}" x="{x:g}" y="{y - 10}" width="12" height="12"/>')
        parts.append(text(x + 18, y, words))
        x += 58
    how = "share of the receiver's tokens by kind of span (peer : receiver); length: receiver tokens per peer token"
    return "".join([*parts, text(x + 6, y, how, kind="quiet")])


def _panel(direction: Direction, x: float, y: float) -> Iterator[str]:
    yield text(x, y + 18, f"{direction.peer} → {direction.receiver}", kind="head")
    right = x + PANEL
    yield text(right - 62, y + 18, "length", anchor="end", kind="quiet")
    yield text(right, y + 18, "rejected", anchor="end", kind="quiet")
    top = y + 34
    for row, (kind, coverage) in enumerate(direction.coverage.items()):
        yield from _bar(kind, coverage, x, top + row * ROW)
    yield from _floor(direction.floor, x, top + len(direction.coverage) * ROW + 22)


def _bar(kind: str, coverage: Coverage, x: float, y: float) -> Iterator[str]:
    yield text(x, y + 15, kind if len(kind) <= LABEL_CHARACTERS else kind[: LABEL_CHARACTERS - 1] + "…")
    start, width = x + LABEL, PANEL - LABEL - FIGURES
    yield f'<rect class="empty" x="{start:g}" y="{y:g}" width="{width:g}" height="21"/>'
    for name in KINDS:
        share = 100 * coverage.share[name]
        size = width * share / 100
        title = f"<title>{KIND_WORDS[name]} {share:.1f} %</title>"
        yield f'<rect class="{name}" x="{start:.1f}" y="{y:g}" width="{size:.1f}" height="21">{title}</rect>'
        if size > 40:
            yield text(
                start + size / 2, y + 15, f"{100 * coverage.share[name]:.1f}", anchor="middle", kind=f"on {name}"
            )
        start += size
    yield text(x + PANEL - 62, y + 15, fixed(coverage.length_ratio, 3), anchor="end")
    rejected = sum(coverage.rejected.values())
    words = f"{rejected} of {coverage.rows}" if rejected else "0"
    yield text(x + PANEL, y + 15, words, anchor="end", kind="" if rejected else "quiet")


def _floor(floor: Floor | NotMeasurable, x: float, y: float) -> Iterator[str]:
    yield text(x, y, "Floor: one policy, seen through both tokenizers", kind="head")
    if isinstance(floor, NotMeasurable):
        for index, line in enumerate(textwrap.wrap(f"not measurable: {floor.reason}", REASON_CHARACTERS // 2)):
            yield text(x, y + 20 * (index + 1), line)
        return
    lengths = " / ".join(map(str, floor.cumulative_std))
    together = " / ".join(f"{std:.2f}" for std in floor.cumulative_std.values())
    narrow, wide = f"{100 * floor.outside_narrow:.1f} %", f"{100 * floor.outside_wide:.1f} %"
    std = f"{floor.one_to_one_std_nats:.2f} nats where 1:1, {floor.other_std_nats:.2f} elsewhere"
    lines = [
        f"log-ratio of one span: std {std}",
        f"of {lengths} spans together: std {together}",
        f"of a whole text: at most {floor.max_sequence_nats:.0e}",
        f"span ratios outside [0.8, 1.2]: {narrow}, outside [0.5, 2]: {wide}",
    ]
    for index, line in enumerate(lines):
        yield text(x, y + 20 * (index + 1), line, kind="" if index < 3 else "quiet")


def _examples(card: PairCard, y: float) -> Iterator[str]:
    if not card.examples:
        return
    yield text(MARGIN, y, f"Commonest spans that differ ({card.names[0]} above, {card.names[1]} below)", kind="head")
    for index, example in enumerate(card.examples):
        x = MARGIN + (index % COLUMNS) * (COLUMN + MARGIN)
        yield from _example(example, x, y + 16 + 52 * (index // COLUMNS))


def _example(example: CutExample, x: float, y: float) -> Iterator[str]:
    for line, pieces in enumerate((example.span.peer, example.span.receiver)):
        place, top = x, y + 21 * line
        for piece in _shortened([visible(piece) for piece in pieces]):
            width = CELL_CHARACTER * len(piece) + 10
            yield f'<rect class="cell" x="{place:.1f}" y="{top:g}" width="{width:.1f}" height="19" rx="3"/>'
            yield text(place + 5, top + 14, piece, kind="mono", more=' xml:space="preserve"')
            place += width + 3
    yield text(x + COLUMN, y + 25, f"{example.count} times in {example.kind}", anchor="end", kind="quiet")


def _shortened(pieces: list[str]) -> list[str]:
    kept: list[str] = []
    for piece in pieces:
        if sum(map(len, kept)) + len(piece) > MAX_CELLS:
            return [*kept, "…"]
        kept.append(piece)
    return kept


def visible(data: bytes) -> str:
    """Bytes of a token as a person can see them: spaces and line ends marked, parts of characters in hexadecimal.

    A mark that would stand on the letter before the token stands on a dotted circle.
    """
    words = data.decode(errors="backslashreplace")
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
    shown = "".join(marks.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in words)
    return DOTTED_CIRCLE + shown if words and unicodedata.combining(words[0]) else shown
