"""Show what the exchange daemon of a run holds and passes on.

    python tools/inspect_see.py [RUN] [--watch [SECONDS]] [--json]

RUN is a run folder, by default the newest in `runs/`. Prints what is held of every policy (records, bytes, refusals,
evictions, watched prompts, last barrier), what flows between each pair (rate, hit rate, mean age in versions), and how
far the readers of streams have come. Rates are means since the daemon started; with --watch, since the previous look.
Exit code 2 with one line when no daemon answers within 2 s.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Column, Table

from mrl.config.run_folder import RunFolder
from mrl.errors import PeerLost, RunFolderError, UserError
from mrl.records.codec import decode, encode
from mrl.records.exchange import PairFlow, PolicyShelf, Stat, StatRequest, StreamState, daemon_message_decoder
from mrl.transport.client import ClientSocket
from mrl.transport.endpoints import read_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys

ANSWER_S = 2.0
PLAIN_WIDTH = 120
LOOK: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run = RunFolder(options.run or newest_run(Path("runs")))
        name = f"admin/{os.getpid()}"
        keys = load_client_keys(run.keys, Grant("admin"))
        client = ClientSocket(keys, lambda: read_endpoint(run.endpoints, "exchange"), identity=name)
        try:
            show(client, name, options)
        finally:
            client.close()
    except KeyboardInterrupt:
        return 0
    except (UserError, PeerLost) as error:
        sys.stderr.write(f"inspect_see: {error}\n")
        return 2
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object per look")
    parser.add_argument("--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="look again and again")
    return parser.parse_args(arguments)


def newest_run(folder: Path) -> Path:
    runs = [path.parent for path in folder.glob("*/config.json")]
    if not runs:
        raise RunFolderError("there is no run", where=str(folder), cure="name the run folder")
    return max(runs, key=lambda run: (run / "config.json").stat().st_mtime)


def show(client: ClientSocket, name: str, options: argparse.Namespace) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    before: Stat | None = None
    while True:
        stat = ask(client, name)
        rates = rates_per_s(stat, before)
        if options.json:
            sys.stdout.write(msgspec.json.encode(as_json(stat, rates)).decode() + "\n")
            sys.stdout.flush()
        else:
            if options.watch and console.is_terminal:
                console.clear()
            console.print(tables(stat, rates))
        if not options.watch:
            return
        before = stat
        time.sleep(options.watch)


def ask(client: ClientSocket, name: str) -> Stat:
    """The daemon's account. Raises PeerLost when none comes within 2 s."""
    end_s = time.monotonic() + ANSWER_S
    is_asked = False
    while time.monotonic() < end_s:
        is_asked = is_asked or client.send(encode(StatRequest(client=name)))
        client.wait(0.05, until_sendable=not is_asked)
        for body in client.receive(0.0):
            message = decode(body, daemon_message_decoder)
            if isinstance(message, Stat):
                return message
    raise PeerLost(f"no exchange daemon of this run answered within {ANSWER_S:.0f} s; is the run still going?")


def rates_per_s(stat: Stat, before: Stat | None) -> dict[tuple[str, str], float]:
    """Records per second of each pair: since `before` if that is the same daemon, otherwise since its start."""
    if before is None or before.incarnation != stat.incarnation:
        return {(flow.source, flow.receiver): flow.records / max(stat.uptime_s, 1e-9) for flow in stat.flows}
    passed_s = max(stat.uptime_s - before.uptime_s, 1e-9)
    earlier = {(flow.source, flow.receiver): flow.records for flow in before.flows}
    pairs = {(flow.source, flow.receiver): flow.records for flow in stat.flows}
    return {pair: (records - earlier.get(pair, 0)) / passed_s for pair, records in pairs.items()}


def as_json(stat: Stat, rates: dict[tuple[str, str], float]) -> dict[str, Any]:
    content = msgspec.to_builtins(stat)
    for row, flow in zip(content["flows"], stat.flows, strict=True):
        row["records_per_s"] = rates[flow.source, flow.receiver]
        row["hit_rate"] = flow.hits / max(1, flow.asked)
    return content


def tables(stat: Stat, rates: dict[tuple[str, str], float]) -> Group:
    lines = (
        f"exchange {stat.incarnation}, up {stat.uptime_s:.0f} s, {len(stat.clients)} clients",
        f"{mib(stat.used_bytes)} of {mib(stat.budget_bytes)} MiB held, log {mib(stat.log_bytes)} MiB",
        f"deliveries: {stat.claims} unacknowledged, {stat.abandoned} abandoned; {stat.dropped_watches} watches dropped",
        f"requests: {stat.unserved} that nobody has been given",
        f"storage: {stat.storage or 'well'}, {stat.unstored} Puts on their way to the log",
        f"dropped input: {listed(stat.malformed)}",
    )
    streams = [stream_table(stat.streams)] if stat.streams else []
    return Group(*lines, "", shelf_table(stat.shelves), flow_table(stat, rates), *streams)


def shelf_table(shelves: list[PolicyShelf]) -> Table:
    table = Table(Column("policy", no_wrap=True), Column("version", no_wrap=True), title="what is held", **LOOK)
    for name in ("prompts", "records", "MiB", "put", "watched", "barrier"):
        table.add_column(name, justify="right")
    for name in ("by type", "refused", "evicted"):
        table.add_column(name, overflow="fold")
    for shelf in shelves:
        barrier = "-" if shelf.barrier is None else shelf.barrier
        numbers = (shelf.prompts, shelf.records, mib(shelf.bytes), shelf.put, shelf.watched_prompts, barrier)
        version = str(shelf.newest) if shelf.newest else "-"
        counts = (shelf.kinds, shelf.refused, shelf.evicted)
        table.add_row(shelf.policy, version, *map(str, numbers), *map(listed, counts))
    return table


def flow_table(stat: Stat, rates: dict[tuple[str, str], float]) -> Table:
    table = Table(Column("from", no_wrap=True), Column("to", no_wrap=True), title="what flows", **LOOK)
    for name in ("records", "per s", "MiB", "asked", "hits", "hit rate", "mean age"):
        table.add_column(name, justify="right")
    for flow in stat.flows:
        table.add_row(flow.source, flow.receiver, *flow_cells(flow, rates[flow.source, flow.receiver]))
    return table


def stream_table(streams: list[StreamState]) -> Table:
    table = Table(Column("policy", no_wrap=True), Column("stream", no_wrap=True), title="who reads", **LOOK)
    for name in ("sent", "took", "committed", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("reader", overflow="fold")
    for state in streams:
        numbers = (state.sent, state.took, state.committed, state.waiting)
        table.add_row(state.policy, state.stream, *map(str, numbers), state.reader or "nobody")
    return table


def flow_cells(flow: PairFlow, rate_per_s: float) -> tuple[str, ...]:
    hit_rate = f"{flow.hits / flow.asked:.2f}" if flow.asked else "-"
    age = f"{flow.mean_age_versions:.1f}" if flow.records else "-"
    return str(flow.records), f"{rate_per_s:.2f}", mib(flow.bytes), str(flow.asked), str(flow.hits), hit_rate, age


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number) or "none"


if __name__ == "__main__":
    raise SystemExit(main())
