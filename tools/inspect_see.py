"""Show what the exchange of a run holds and passes on.

    python tools/inspect_see.py [RUN] [--watch [SECONDS]] [--json]
    python tools/inspect_see.py [RUN] --dump ID

RUN is a run folder, by default the newest in `runs/`. Prints what is held of every policy (records, ages, refusals,
evictions, watched prompts, last barrier), what flows between each pair (rate, hit rate, mean age in versions), and who
waits. Rates are means since the daemon started; with --watch, since the previous look. Where no daemon answers within
2 s, it prints what the file of the run holds.

--dump shows a record of the file by its id, also while a daemon writes; of one that is held no longer it says why.

Exit code 2 with one line when there is neither a daemon nor a file.
"""

import argparse
import os
import sys
import time
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from see_daemon import Daemon
from see_file import find, record_lines, stat_of
from see_tables import Rates, rates_per_s, shelf_table, tables

from mrl.config.run_folder import RunFolder
from mrl.errors import MRLError, PeerLost, RunFolderError
from mrl.exchange.store import FILE
from mrl.records.exchange_messages import Stat

PLAIN_WIDTH = 120


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        act(RunFolder(options.run or newest_run(Path("runs"))), options)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whatever Python still writes at its end has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MRLError as error:
        sys.stderr.write(f"inspect_see: {error}\n")
        return 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object per look")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again and again")
    actions.add_argument("--dump", metavar="ID", help="show one record")
    return parser.parse_args(arguments)


def newest_run(folder: Path) -> Path:
    runs = [path.parent for path in folder.glob("*/config.json")]
    if not runs:
        raise RunFolderError("there is no run", where=str(folder), cure="name the run folder")
    return max(runs, key=lambda run: (run / "config.json").stat().st_mtime)


def act(run: RunFolder, options: argparse.Namespace) -> None:
    if options.dump is not None:
        dump(run, options.dump)
        return
    with ExitStack() as closing:
        try:
            daemon = Daemon(run)
            closing.callback(daemon.close)
            show(daemon, options)
        except (PeerLost, RunFolderError):
            if not (run.exchange / FILE).exists():
                raise
            show_file(run, options)


def show(daemon: Daemon, options: argparse.Namespace) -> None:
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
    """What a run left behind."""
    stat = stat_of(run.exchange)
    rates = rates_per_s(stat, stat)
    if options.json:
        _print_json(stat, rates)
        return
    console = _console()
    console.print(f"no daemon answers; this is what {run.exchange / FILE} holds", markup=False, highlight=False)
    console.print(shelf_table(stat.shelves, rates))


def as_json(stat: Stat, rates: Rates) -> dict[str, Any]:
    content = msgspec.to_builtins(stat)
    for row, flow in zip(content["flows"], stat.flows, strict=True):
        row["records_per_s"] = rates.delivered[flow.source, flow.receiver]
        row["hit_rate"] = flow.hits / max(1, flow.asked)
    for row in content["shelves"]:
        row["put_per_s"] = rates.put[row["policy"]]
        row["refused_per_s"] = {reason: rates.refused[row["policy"], reason] for reason in row["refused"]}
    return content


def dump(run: RunFolder, record_id: str) -> None:
    """Print a record. Raises RunFolderError when nobody knows of it."""
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


if __name__ == "__main__":
    raise SystemExit(main())
