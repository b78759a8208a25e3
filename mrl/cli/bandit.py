"""`mrl bandit [--out DIR] [--quick] [--seed N]`: the contextual-bandit study as a table, pictures and one page."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from mrl.errors import ConfigError

if TYPE_CHECKING:
    from mrl.bandit.study import Results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to write, how much, and which random numbers."""
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("bandit"), help="folder to write to (bandit/)")
    parser.add_argument("--quick", action="store_true", help="fewer draws and a smaller toy, for a first look")
    parser.add_argument("--seed", type=_seed, metavar="N", default=0, help="seed of everything random (0)")


def run(arguments: argparse.Namespace) -> int:
    """Compute, print the tables, write the files and print their paths, the page first.

    Files of an earlier study are replaced, each whole; a folder with anything else in it is refused before any work.
    Raises ConfigError for such a folder, or when matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("needs matplotlib", where="mrl bandit", cure="pip install 'matplotlib>=3.10' (extra `plots`)")
    from mrl.bandit import study

    study.check_folder(arguments.out)
    results = study.compute(study.QUICK if arguments.quick else study.FULL, arguments.seed)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(_reference_table(results))
    console.print(_toy_table(results))
    for path in study.write(arguments.out, results):
        print(path)
    return 0


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise ValueError(text)
    return seed


_seed.__name__ = "seed"  # argparse names the type in its message: "invalid seed value: 'x'"


def _reference_table(results: "Results") -> Table:
    from mrl.bandit.study_page import significant

    title = (
        f"reference instance: p {results.bandit.p:.4f}, q {results.bandit.q:.4f}, groups of {results.settings.group}"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("method", "the peer gives"):
        table.add_column(name, no_wrap=True)
    for name in ("support S", "sampled", "variance V", "sampled", "bias", "S/√V"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        sampled = (row.measured.support, row.measured.variance)
        cells = (row.support, sampled[0], row.variance, sampled[1], row.bias)
        ratio = f"{row.support / row.variance**0.5:.2f}"
        table.add_row(row.name, row.shares, *map(significant, cells), ratio)
    return table


def _toy_table(results: "Results") -> Table:
    from mrl.bandit.study import toy_table

    toy = toy_table(results)
    size = results.size.toy
    title = f"toy: mean success, {size.contexts} contexts, {size.seeds} seed(s)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for step in toy.steps:
        table.add_column(f"after {step} steps", justify="right")
    for name, values in toy.by_method.items():
        table.add_row(name, *(f"{value:.3f}" for value in values))
    return table
