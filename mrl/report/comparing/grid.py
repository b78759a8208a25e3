"""A table of strings, for a terminal and as Markdown, and its cells for means over seeds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from mrl.report.comparison import Interval

NOTHING = "-"


class Grid(NamedTuple):
    """A table of strings with a title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def rich_table(grid: Grid) -> Table:
    """Return a table for a terminal."""
    table = Table(title=grid.title, title_justify="left")
    for place, name in enumerate(grid.head):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in grid.rows:
        table.add_row(*row)
    return table


def markdown(grid: Grid) -> str:
    """Return a table as Markdown, with its title above."""
    lines = [grid.head, ["---", *["--:"] * (len(grid.head) - 1)], *grid.rows]
    return f"{grid.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def plus_minus(found: Interval, digits: int = 3) -> str:
    """Return a mean with its half width, `0.451 ± 0.157`; for one seed the mean alone, for none `-`."""
    if math.isnan(found.mean):
        return NOTHING
    told = f"{found.mean:.{digits}f}"
    return told if math.isnan(found.half) else f"{told} ± {found.half:.{digits}f}"


def signed_interval(found: Interval, digits: int = 3) -> str:
    """Return a difference with its interval, `+0.218 [+0.181, +0.255]`; for one seed without it, for none `-`."""
    if math.isnan(found.mean):
        return NOTHING
    form = f"+.{digits}f"
    told = f"{found.mean:{form}}"
    return told if math.isnan(found.half) else f"{told} [{found.low:{form}}, {found.high:{form}}]"
