"""`mrl inspect [RUN] [--watch [SECONDS]] [--json | --dump ID]`: show what the exchange of a run holds and delivers.

RUN is a run folder, by default the newest in `runs/`. The command prints the holdings of every policy (records, ages,
refusals, evictions, watched prompts, last barrier), the flow between each pair (rate, hit rate, mean age in versions),
and the clients that wait. Rates are means since the daemon started; with --watch, since the previous look. Where no
daemon answers within 2 s, the command prints the contents of the run's exchange file.

--dump shows a record of the file by its id, also while a daemon writes; for a removed record it shows the reason.
"""

import argparse
import sys
import time
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from mrl.config.run_folder import RunFolder
from mrl.errors import PeerLost, RunFolderError, UserError
from mrl.exchange.store import FILE
from mrl.inspection.exchange_tables import Rates, policy_table, rates_per_s, tables
from mrl.inspection.file_stats import find, stat_of
from mrl.inspection.shown_records import record_lines
from mrl.inspection.stat_client import StatClient
from mrl.records.exchange_messages import Stat

PLAIN_WIDTH = 120
MIN_PERIOD_S, MAX_PERIOD_S = 0.05, 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run, period of looks, form of output."""
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="folder of the run; default: the newest in runs/"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object per reading")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument(
        "--watch", nargs="?", type=_period, const=2.0, metavar="SECONDS", help="refresh every SECONDS (default: 2)"
    )
    actions.add_argument("--dump", metavar="ID", help="show the record with this id")


def _period(text: str) -> float:
    """Return the seconds between two looks. Raises ArgumentTypeError."""
    with suppress(ValueError):
        if MIN_PERIOD_S <= float(text) <= MAX_PERIOD_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; wanted {MIN_PERIOD_S:g} to {MAX_PERIOD_S:g} seconds")


def run(arguments: argparse.Namespace) -> int:
    """Look once or, with --watch, until an interrupt.

    Raises UserError where --json and --dump are both given, RunFolderError where there is neither a daemon nor a file.
    """
    if arguments.json and arguments.dump is not None:
        raise UserError("--json and --dump cannot be combined", where="mrl inspect", cure="remove one of them")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    folder = RunFolder(arguments.run or newest_run(Path("runs")))
    try:
        if arguments.dump is None:
            look(folder, arguments)
        else:
            dump(folder, arguments.dump)
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
    return 0


def newest_run(folder: Path) -> Path:
    """Return the newest run in `folder`. Raises RunFolderError when `folder` holds none."""
    runs = [path.parent for path in folder.glob("*/config.json")]
    if not runs:
        raise RunFolderError(
            "the folder contains no run", where=str(folder), cure="give the folder of a run, runs/<name>"
        )
    return max(runs, key=lambda run: (run / "config.json").stat().st_mtime)


def look(run: RunFolder, options: argparse.Namespace) -> None:
    """Show the account of the daemon; where no daemon answers, that of the file."""
    with ExitStack() as closing:
        try:
            daemon = StatClient(run)
            closing.callback(daemon.close)
            show(daemon, options)
        except PeerLost as error:
            if not (run.exchange / FILE).exists():
                raise RunFolderError(str(error), where=str(run.path)) from None
            show_file(run, options)
        except RunFolderError:
            if not (run.exchange / FILE).exists():
                raise
            show_file(run, options)


def show(daemon: StatClient, options: argparse.Namespace) -> None:
    """Print the daemon's account of the exchange, once or again and again."""
    console, before = _console(), None
    while True:
        stat = daemon.ask()
        if options.watch and console.is_terminal and not options.json:
            console.clear()
        rates = rates_per_s(stat, before)
        if options.json:
            _print_json(stat, rates)
        else:
            console.print(tables(stat, rates))
        if not options.watch:
            return
        before = stat
        time.sleep(options.watch)


def show_file(run: RunFolder, options: argparse.Namespace) -> None:
    """Print the account of the exchange's file, which a run left behind."""
    stat = stat_of(run.exchange)
    rates = rates_per_s(stat, stat)
    if options.json:
        _print_json(stat, rates)
        return
    console = _console()
    console.print(
        f"no exchange daemon answers; these are the contents of {run.exchange / FILE}", markup=False, highlight=False
    )
    console.print(policy_table(stat.policies, rates))


def as_json(stat: Stat, rates: Rates) -> dict[str, Any]:
    """Return the account of the exchange, with rates beside its numbers."""
    content = msgspec.to_builtins(stat)
    for row, flow in zip(content["flows"], stat.flows, strict=True):
        row["records_per_s"] = rates.delivered[flow.source, flow.receiver]
        row["hit_rate"] = flow.hits / max(1, flow.asked)
    for row in content["policies"]:
        row["put_per_s"] = rates.put[row["policy"]]
        row["refused_per_s"] = {reason: rates.refused[row["policy"], reason] for reason in row["refused"]}
    return content


def dump(run: RunFolder, record_id: str) -> None:
    """Print a record, or why it was removed. Raises RunFolderError when the file knows no such record."""
    found = find(run.exchange, record_id)
    if found is None:
        raise RunFolderError("no such record", where=str(run.exchange / FILE), got=record_id)
    body, where = found
    for line in record_lines(body, found=where) if body else [where]:
        print(line)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def _print_json(stat: Stat, rates: Rates) -> None:
    sys.stdout.write(msgspec.json.encode(as_json(stat, rates)).decode() + "\n")
    sys.stdout.flush()
