"""`mrl align card A B [--text FILE] [--out DIR]`, `mrl align show A B "text"`: compare two tokenizers.

A and B are model folders, or their `tokenizer.json` files.
`mrl align floors RUN` measures, for every pair of policies of a run, the residual that the two tokenizers alone cause;
the run's report compares the measured residual with this floor.
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
from mrl.alignment.exact_tries import Floor, NotMeasurable
from mrl.alignment.pair_card import Direction, PairCard, make_card
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.residual import KINDS
from mrl.cli.align_show import show, visible
from mrl.errors import ConfigError, TokenizerRefused
from mrl.files import replace_file
from mrl.processes.preparation.pair_cards import write_pair_cards

KIND_WORDS = {"one_to_one": "1:1", "one_to_many": "1:n", "many_to_one": "n:1", "many_to_many": "m:n"}
FLOOR_COLUMNS = ("text, max", "span std: 1:1", "other", "ratio outside [.8,1.2]", "[.5,2]")
PLAIN_WIDTH = 140
"""Characters per line where the output is no terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three actions with their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="card|show|floors")
    floors = actions.add_parser(
        "floors", help="measure the floors of a run's pairs of tokenizers that have none yet", allow_abbrev=False
    )
    floors.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    card = actions.add_parser(
        "card", help="write a pair card: what to expect of two tokenizers, before any training", allow_abbrev=False
    )
    both = actions.add_parser(
        "show", help="show both segmentations of a text, common spans in colour", allow_abbrev=False
    )
    for action in (card, both):
        action.add_argument("first", type=Path, metavar="A", help="model folder, or its tokenizer.json")
        action.add_argument("second", type=Path, metavar="B", help="the other model folder, or its tokenizer.json")
    text_help = "file with a text of your own, beside the built-in kinds; may be given several times"
    card.add_argument("--text", type=Path, metavar="FILE", action="append", default=[], help=text_help)
    card.add_argument("--only-text", action="store_true", help="skip the built-in kinds of text")
    card.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("."), help="folder to write the card to (default: .)"
    )
    both.add_argument("text", metavar="TEXT", help="text to tokenize")
    both.add_argument("--color", action="store_true", help="colour the output even when it is not a terminal")


def run(arguments: argparse.Namespace) -> int:
    """Make a card, show a text, or measure the pairs of a run."""
    if arguments.action == "floors":
        for path in write_pair_cards(arguments.run):
            print(path)
        return 0
    names = _names(arguments.first, arguments.second)
    if arguments.action == "show":
        receivers = (load_receiver(arguments.first), load_receiver(arguments.second))
        show(_console(coloured=arguments.color), names, receivers, arguments.text)
        return 0
    texts = _texts(arguments.text, only_own=arguments.only_text)
    card = make_card(names, (_load(arguments.first), _load(arguments.second)), texts)
    _print_card(_console(), card)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"pair_card_{names[0]}_{names[1]}.json"
    replace_file(path, json.dumps(card.to_json(), indent=1).encode("utf-8", "backslashreplace"))
    print(path)
    return 0


def _console(*, coloured: bool = False) -> Console:
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(width=width, highlight=False, force_terminal=coloured or None)


def _load(path: Path) -> Receiver | TokenizerRefused:
    """Return the receiver, or the refusal for the card to show. Errors for missing or broken files are raised."""
    try:
        return load_receiver(path)
    except TokenizerRefused as refusal:
        return refusal


def _texts(paths: Sequence[Path], *, only_own: bool) -> dict[str, list[str]]:
    """Return kind -> rows: the built-in kinds, and files under their names."""
    if only_own and not paths:
        raise ConfigError("no text to measure", where="--only-text", cure="give a file with --text FILE")
    texts = {} if only_own else card_texts()
    for path in paths:
        name = str(path) if path.name in texts else path.name
        texts[name] = _read_rows(path)
    return texts


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return names that tell the two tokenizers apart: last parts of their paths, numbered where these are equal."""
    short = (first.resolve().name, second.resolve().name)
    return short if short[0] != short[1] else (f"{short[0]}_1", f"{short[1]}_2")


def _read_rows(path: Path) -> list[str]:
    try:
        rows = rows_of(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the text cannot be read", where=str(path), got=str(error), wanted="UTF-8 text") from error
    if not rows:
        raise ConfigError("the text is empty", where=str(path), wanted="UTF-8 text")
    return rows


def _print_card(console: Console, card: PairCard) -> None:
    if card.is_identity:
        console.print("Both models have the same tokenizer: ids and log-probs are used unchanged.")
    for name, why in card.refusals.items():
        console.print(Text(f"refused: {name}: {why}"), soft_wrap=True)
    if card.directions:
        console.print(_coverage_table(card.directions))
        _print_floors(console, card.directions)
    if card.examples:
        table = Table("span", *card.names, "times", "in", box=box.SIMPLE_HEAD, title_justify="left")
        table.title = "most frequent spans that differ"
        for example in card.examples:
            cut = [" ".join(map(visible, side)) for side in (example.span.peer, example.span.receiver)]
            whole = visible(b"".join(example.span.peer))
            table.add_row(*(Text(_short(words)) for words in (whole, *cut)), str(example.count), example.kind)
        console.print(table)


def _coverage_table(directions: Sequence[Direction]) -> Table:
    """Table of coverage: shares of receiver tokens in percent, by kind of span."""
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


def _print_floors(console: Console, directions: Sequence[Direction]) -> None:
    title = "floor: one policy seen through both tokenizers, log-ratios in nats; Rk: std of their sum over k spans"
    floors = {f"{d.peer} → {d.receiver}": d.floor for d in directions if isinstance(d.floor, Floor)}
    if floors:
        lengths = list(next(iter(floors.values())).cumulative_std)
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        table.add_column("peer → receiver", no_wrap=True)
        for name in [*FLOOR_COLUMNS, *(f"R{k}" for k in lengths)]:
            table.add_column(name, justify="right")
        for pair, floor in floors.items():
            table.add_row(pair, *_floor_cells(floor))
        console.print(table)
    for direction in directions:
        if isinstance(direction.floor, NotMeasurable):
            words = f"floor {direction.peer} → {direction.receiver}: not measurable, {direction.floor.reason}"
            console.print(Text(words), soft_wrap=True)


def _floor_cells(floor: Floor) -> list[str]:
    return [
        f"{floor.max_sequence_nats:.0e}",
        f"{floor.one_to_one_std_nats:.2f}",
        f"{floor.other_std_nats:.2f}",
        f"{100 * floor.outside_narrow:.1f}%",
        f"{100 * floor.outside_wide:.1f}%",
        *(f"{std:.2f}" for std in floor.cumulative_std.values()),
    ]


def _short(words: str) -> str:
    return words if len(words) <= 40 else words[:39] + "…"
