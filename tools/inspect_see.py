"""Show what the exchange daemons of a run hold and pass on.

    python tools/inspect_see.py [RUN] [--watch [SECONDS]] [--json]
    python tools/inspect_see.py [RUN] --dump ID|FILE
    python tools/inspect_see.py [RUN] --drain [SECONDS] | --undrain

RUN is a run folder, by default the newest in `runs/`. Prints what is held of every policy (records, ages, refusals,
evictions, watched prompts, last barrier), what flows between each pair (rate, hit rate, mean age in versions), how far
the readers of streams have come, and who waits. Rates are means since the daemon started; with --watch, since the
previous look.

--dump shows a record by its id: from the daemon that holds it, or else from the log, also when no daemon runs. Of a
file (a segment, or a stretch in `exchange/quarantine/`) it shows whatever can be made out.

--drain lets the daemons take no new Puts and waits, at most SECONDS (60), until everything was delivered; what then is
left is named, with exit code 1. They take Puts again after --undrain or a restart.

Exit code 2 with one line when no daemon answers within 2 s.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from see_daemon import Daemon, connect, left_over
from see_dump import file_lines, find_on_log, record_lines
from see_tables import Rates, rates_per_s, tables

from mrl.config.run_folder import RunFolder
from mrl.errors import MRLError, PeerLost, RunFolderError
from mrl.records.exchange_messages import Drain, Peek, Peeked, Stat, StatRequest

DRAIN_LOOK_S = 0.5
PLAIN_WIDTH = 120


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = act(RunFolder(options.run or newest_run(Path("runs"))), options)
        sys.stdout.flush()
        return code
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
    parser.add_argument("--json", action="store_true", help="one JSON object per daemon and look")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again and again")
    actions.add_argument("--dump", metavar="ID|FILE", help="show one record, or a file of the exchange's folder")
    actions.add_argument("--drain", nargs="?", type=float, const=60.0, metavar="SECONDS", help="take no new Puts")
    actions.add_argument("--undrain", action="store_true", help="take Puts again")
    return parser.parse_args(arguments)


def newest_run(folder: Path) -> Path:
    runs = [path.parent for path in folder.glob("*/config.json")]
    if not runs:
        raise RunFolderError("there is no run", where=str(folder), cure="name the run folder")
    return max(runs, key=lambda run: (run / "config.json").stat().st_mtime)


def act(run: RunFolder, options: argparse.Namespace) -> int:
    if options.dump is not None:
        return dump(run, options.dump)
    with ExitStack() as closing:
        daemons = connect(run, closing)
        if options.drain is not None:
            return drain(daemons, options.drain)
        if options.undrain:
            turn(daemons, is_on=False)
            print("Puts are taken again")
        else:
            show(daemons, options)
    return 0


def show(daemons: Sequence[Daemon], options: argparse.Namespace) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    before: dict[int, Stat] = {}
    while True:
        stats = {daemon.shard: daemon.ask(StatRequest(client=daemon.name), Stat) for daemon in daemons}
        if options.watch and console.is_terminal and not options.json:
            console.clear()
        for shard, stat in stats.items():
            rates = rates_per_s(stat, before.get(shard))
            if options.json:
                sys.stdout.write(msgspec.json.encode(as_json(stat, rates, shard)).decode() + "\n")
                sys.stdout.flush()
            else:
                console.print(tables(stat, rates, shard=shard if len(stats) > 1 else None))
        if not options.watch:
            return
        before = stats
        time.sleep(options.watch)


def as_json(stat: Stat, rates: Rates, shard: int) -> dict[str, Any]:
    content = {"shard": shard} | msgspec.to_builtins(stat)
    for row, flow in zip(content["flows"], stat.flows, strict=True):
        row["records_per_s"] = rates.delivered[flow.source, flow.receiver]
        row["hit_rate"] = flow.hits / max(1, flow.asked)
    for row in content["shelves"]:
        row["put_per_s"] = rates.put[row["policy"]]
        row["refused_per_s"] = {reason: rates.refused[row["policy"], reason] for reason in row["refused"]}
    return content


def dump(run: RunFolder, what: str) -> int:
    """Print a record of this id, or the file of this name."""
    path = Path(what)
    if path.is_file():
        lines = file_lines(path)
    else:
        body, where = find(run, what)
        lines = record_lines(body, found=where)
    for line in lines:
        print(line)
    return 0


def find(run: RunFolder, record_id: str) -> tuple[bytes, str]:
    """A record and where it was found: held by a daemon, or on a log. Raises RunFolderError when it is nowhere."""
    with ExitStack() as closing:
        try:
            for daemon in connect(run, closing):
                answer = daemon.ask(Peek(client=daemon.name, record_id=record_id), Peeked)
                if answer.body:
                    place = f"record number {answer.number} of the exchange"
                    return answer.body, f"held by the daemon, {place}, {answer.age_versions} versions old"
            whose = "no daemon holds it by itself, though perhaps in a pack"
        except (PeerLost, RunFolderError):
            whose = "no daemon answers"
    for folder in (run.exchange, *sorted(run.exchange.glob("shard_*"))):
        found = find_on_log(folder, record_id)
        if found is not None:
            return found[1], f"{whose}; on the log in {folder} at offset {found[0]}"
    raise RunFolderError(f"no such record or file ({whose}, and not on the log)", where=str(run.path), got=record_id)


def drain(daemons: Sequence[Daemon], within_s: float) -> int:
    """Take no new Puts, and wait until all is delivered; 1 when something is left at the end."""
    end_s = time.monotonic() + within_s
    before: dict[int, Stat] = {}
    while True:
        stats = turn(daemons, is_on=True)
        left = [line for shard, stat in stats.items() for line in left_over(stat, before.get(shard))]
        if not left:
            print("drained: everything was delivered; Puts are taken again after --undrain or a restart")
            return 0
        if time.monotonic() >= end_s:
            sys.stderr.write(f"inspect_see: not drained within {within_s:g} s: {'; '.join(left)}\n")
            return 1
        before = stats
        time.sleep(DRAIN_LOOK_S)


def turn(daemons: Sequence[Daemon], *, is_on: bool) -> dict[int, Stat]:
    """Let all daemons drain, or take Puts again; their accounts after that."""
    return {daemon.shard: daemon.ask(Drain(client=daemon.name, is_on=is_on), Stat) for daemon in daemons}


if __name__ == "__main__":
    raise SystemExit(main())
