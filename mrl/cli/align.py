"""`mrl align card A B [--text FILE] [--out DIR]`, `mrl align show A B "text"`: what two tokenizers are to each other.

A and B are model folders, or the files `tokenizer.json` or `tekken.json` themselves.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.alignment.card_text import card_texts, rows_of
from mrl.alignment.exact_tries import Floor
from mrl.alignment.pair_card import Direction, PairCard, SpanText, make_card, span_texts, translated
from mrl.alignment.rank_file import load_tekken
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.residual import KINDS
from mrl.errors import ConfigError
from mrl.files import replace_file
from mrl.report.card_picture import KIND_WORDS, card_picture, visible

COLOURS = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")
DIFFERENT = "white on red"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="card|show")
    card = actions.add_parser("card", help="what to expect of the pair, before any training", allow_abbrev=False)
    show = actions.add_parser("show", help="both segmentations of a text, common spans in colour", allow_abbrev=False)
    for action in (card, show):
        action.add_argument("first", type=Path, metavar="A", help="model folder, tokenizer.json or tekken.json")
        action.add_argument("second", type=Path, metavar="B", help="the other one")
    card.add_argument("--text", type=Path, metavar="FILE", help="a text of your own instead of the built-in kinds")
    card.add_argument("--out", type=Path, metavar="DIR", default=Path("."), help="where card and picture go (here)")
    show.add_argument("text", metavar="TEXT", help="the text to cut")


def run(arguments: argparse.Namespace) -> int:
    """Make a card, or show a text."""
    receivers = (_load(arguments.first), _load(arguments.second))
    names = _names(arguments.first, arguments.second)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    if arguments.action == "show":
        _show(console, names, receivers, arguments.text)
        return 0
    texts = {arguments.text.name: _read_rows(arguments.text)} if arguments.text else card_texts()
    card = make_card(names, receivers, texts)
    _print_card(console, card)
    stem = f"pair_card_{names[0]}_{names[1]}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".json", json.dumps(card.to_json(), indent=1)), (".svg", card_picture(card))):
        path = arguments.out / (stem + suffix)
        replace_file(path, content.encode("utf-8", "backslashreplace"))
        print(path)
    return 0


def _load(path: Path) -> Receiver:
    if path.is_dir():
        return load_receiver(path)
    if path.name == "tokenizer.json":
        return load_receiver(path.parent)
    if path.suffix == ".json":
        return load_tekken(path)
    wanted = "a model folder, tokenizer.json or tekken.json"
    cure = "a bare rank file does not say how it splits text; use the tokenizer.json of its family"
    raise ConfigError("no tokenizer", where=str(path), got=path.name, wanted=wanted, cure=cure)


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Names that tell the two apart: the last part of the path, or both sides of the pair numbered."""
    short = (first.resolve().name, second.resolve().name)
    return short if short[0] != short[1] else (f"{short[0]}_1", f"{short[1]}_2")


def _read_rows(path: Path) -> list[str]:
    try:
        rows = rows_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the text cannot be read", where=str(path), got=str(error), wanted="UTF-8 text") from error
    if not rows:
        raise ConfigError("the text is empty", where=str(path), wanted="UTF-8 text")
    return rows


def _print_card(console: Console, card: PairCard) -> None:
    if card.is_identity:
        console.print("One tokenizer: ids and log-probs pass through untouched.")
    console.print(_coverage_table(card.directions))
    console.print(_floor_table(card.directions))
    if card.examples:
        table = Table("span", *card.names, "times", "in", box=box.SIMPLE_HEAD, title_justify="left")
        table.title = "commonest spans that differ"
        for example in card.examples:
            cut = [" ".join(map(visible, side)) for side in (example.span.peer, example.span.receiver)]
            whole = visible(b"".join(example.span.peer))
            table.add_row(*(Text(_short(words)) for words in (whole, *cut)), str(example.count), example.kind)
        console.print(table)


def _coverage_table(directions: Sequence[Direction]) -> Table:
    """Shares are of receiver tokens, in percent."""
    table = Table(box=box.SIMPLE_HEAD, title="coverage, % of receiver tokens by kind of span", title_justify="left")
    table.add_column("peer → receiver", no_wrap=True)
    table.add_column("text")
    numbers = [*KIND_WORDS.values(), "tok/span", "bytes/span", "p99/max", "bytes in 1:1 %", "length", "rejected"]
    for name in numbers:
        table.add_column(name, justify="right")
    for direction in directions:
        pair = f"{direction.peer} → {direction.receiver}"
        for kind, coverage in direction.coverage.items():
            rejected = ", ".join(f"{n} {reason}" for reason, n in coverage.rejected.items())
            table.add_row(
                pair,
                kind,
                *(f"{100 * coverage.share[name]:.1f}" for name in KINDS),
                f"{coverage.tokens_per_span:.2f}",
                f"{coverage.bytes_per_span:.2f}",
                f"{coverage.p99_tokens_per_span}/{coverage.max_tokens_per_span}",
                f"{100 * coverage.one_to_one_byte_share:.1f}",
                f"{coverage.length_ratio:.3f}",
                f"{rejected} of {coverage.rows}" if rejected else "0",
            )
            pair = ""
    return table


def _floor_table(directions: Sequence[Direction]) -> Table:
    title = "floor: one policy seen through both tokenizers, log-ratios in nats; Rk: std of their sum over k spans"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("peer → receiver", no_wrap=True)
    lengths = list(directions[0].floor.cumulative_std)
    names = ["text, max", "span std: 1:1", "other", "ratio outside [.8,1.2]", "[.5,2]"]
    for name in [*names, *(f"R{k}" for k in lengths)]:
        table.add_column(name, justify="right")
    for direction in directions:
        table.add_row(f"{direction.peer} → {direction.receiver}", *_floor_cells(direction.floor))
    return table


def _floor_cells(floor: Floor) -> list[str]:
    return [
        f"{floor.max_sequence_nats:.0e}",
        f"{floor.one_to_one_std_nats:.2f}",
        f"{floor.other_std_nats:.2f}",
        f"{100 * floor.outside_narrow:.1f}%",
        f"{100 * floor.outside_wide:.1f}%",
        *(f"{std:.2f}" for std in floor.cumulative_std.values()),
    ]


def _show(console: Console, names: tuple[str, str], receivers: tuple[Receiver, Receiver], words: str) -> None:
    answers, batch = translated(*receivers, [words])
    if batch.reject_reason[0]:
        console.print(f"{names[1]} cannot express this text: {batch.reject_reason[0]}")
        return
    spans = span_texts(answers[0], batch, 0)
    width = max(map(len, names))
    for name, line in zip(names, segmentations(spans), strict=True):
        console.print(Text(f"{name:<{width}}  ") + line, soft_wrap=True)
    one = sum(span.is_one_to_one for span in spans)
    console.print(f"{len(spans)} common spans, {one} of them 1:1; red: one side has more tokens", style="dim")


def segmentations(spans: Sequence[SpanText]) -> tuple[Text, Text]:
    """Both sides: one colour per common span, a bar between the tokens of one span; spans that differ are red."""
    lines = (Text(), Text())
    for index, span in enumerate(spans):
        style = COLOURS[index % 2] if span.is_one_to_one else DIFFERENT
        sides = ["|".join(map(visible, side)) for side in (span.peer, span.receiver)]
        widest = max(map(len, sides))
        for line, side in zip(lines, sides, strict=True):
            line.append(f"{side:<{widest}}", style=style)
            line.append(" ")
    return lines


def _short(words: str, limit: int = 40) -> str:
    return words if len(words) <= limit else words[: limit - 1] + "…"
