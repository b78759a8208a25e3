"""`mrl bandit [--out DIR] [--quick] [--seed N]`: make tables, numbers and pictures of the contextual-bandit study."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from mrl.errors import ConfigError
from mrl.files import replace_file

if TYPE_CHECKING:
    from mrl.bandit.study import Results

NUMBERS = "bandit.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: folder, size of the study, and seed."""
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("bandit"), help="folder to write to (default: bandit/)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer draws and a smaller toy, for a first look")
    parser.add_argument("--seed", type=_seed, metavar="N", default=0, help="random seed (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Compute the study, print its tables, write its files and print their paths.

    Files of an earlier study are replaced, each whole; a folder with anything else in it is refused before any work.
    Raises ConfigError for such a folder, or when matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed", where="mrl bandit", cure="pip install 'mrl[plots]'")
    from mrl.bandit import study

    check_folder(arguments.out, (NUMBERS, *study.PICTURES))
    results = study.compute(study.QUICK if arguments.quick else study.FULL, arguments.seed)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(_reference_table(results))
    console.print(_toy_table(results))
    figures = (json.dumps(study.numbers(results), indent=1) + "\n").encode()
    files = {NUMBERS: figures} | study.draw(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(arguments.out / name, data)
        print(arguments.out / name)
    return 0


def check_folder(folder: Path, ours: Collection[str]) -> None:
    """Raises ConfigError when the folder cannot be made or holds files other than `ours`, hidden files aside."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            "the folder is not writable", where=f"--out {folder}", got=str(nearest), wanted="a writable folder"
        )
    foreign = sorted(
        path.name
        for path in (folder.iterdir() if folder.exists() else ())
        if path.name not in ours and not path.name.startswith(".")
    )
    if foreign:
        raise ConfigError(
            "the folder contains files that `mrl bandit` did not write",
            where=f"--out {folder}",
            got=foreign[0],
            cure="choose a new or empty folder, or one that `mrl bandit` wrote",
        )


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise ValueError(text)
    return seed


_seed.__name__ = "seed"  # argparse names the type in its message: "invalid seed value: 'x'"


def _reference_table(results: "Results") -> Table:
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
        table.add_row(row.name, row.shares, *map(_significant, cells), ratio)
    return table


def _significant(value: float) -> str:
    """Return a number with three significant digits, and an exponent only below 0.0001 and from 100 000 on."""
    if value == 0 or abs(value) < 1e-15:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e5:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".")


def _toy_table(results: "Results") -> Table:
    from mrl.bandit.toy import table_steps

    size = results.size.toy
    steps = table_steps(size)
    title = f"toy: mean success, {size.contexts} contexts, {size.seeds} seed(s)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for step in steps:
        table.add_column(f"after {step} steps", justify="right")
    for name, curve in results.curves.items():
        table.add_row(name, *(f"{curve.after(step):.3f}" for step in steps))
    return table
