"""The exchange daemon of one run, or one of its shards.

Owns: the records that policies share on its prompts, and their log, in `exchange/` or `exchange/shard_N`.
Speaks: acknowledgements, deliveries and barrier states to learners and workers; metrics to the supervisor;
    /metrics and /health to whoever asks.
Waits for: messages, without a bound of its own: an idle exchange says so and costs nothing.
Unblocked by: any client.
If it dies: learners go on without what it has and count it; the restarted daemon replays its log, and its clients find
    it again.
Memory: its budget and some 150 MB; at 512 MiB beside the budget it ends. A client that is let in can make the socket
    gather a message without end, and then this process ends instead of all others on the machine.
"""

import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from mrl.config.run_folder import RunFolder, local_folder
from mrl.config.schema import RunConfig
from mrl.exchange.daemon import MIB, ExchangeDaemon, Limits
from mrl.exchange.exposition import Exposition
from mrl.exchange.shards import endpoint_of, folder_of, role_of
from mrl.metrics.telemetry import Telemetry
from mrl.records.exchange_messages import Stat
from mrl.roles import exchange_pages, wiring
from mrl.roles.exchange_memory import SPARE_BYTES, compact_heap, data_bytes, limit_memory
from mrl.transport.keys import load_keys

ROUND_S = 0.2
REPORT_S = 2.0

MAX_VALUES = 500
log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Serve until told to stop."""

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        return _serve(config, folder, closing, index)

    return wiring.run_role(run_folder, role_of(index), "", body)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack, shard: int) -> int:
    stop = wiring.stop_event()
    compact_heap()
    limit_memory(data_bytes() + config.exchange.budget_mib * MIB + SPARE_BYTES)
    telemetry = wiring.connect_telemetry(folder, role_of(shard), "", closing)
    daemon = _open(config, folder, shard)
    closing.callback(daemon.close)
    exposition = Exposition(daemon.stat(), time.monotonic)
    closing.enter_context(exchange_pages.served(exposition, config.exchange, folder, shard))
    reload = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    telemetry.doing("serving")
    next_report_s = time.monotonic()
    while not stop.is_set():
        daemon.round(ROUND_S)
        exposition.beat()
        if reload.is_set():
            reload.clear()
            daemon.reload_keys()
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + REPORT_S
            stat = daemon.stat()
            exposition.hand_over(stat)
            _report(stat, telemetry)
    return 0


def _open(config: RunConfig, folder: RunFolder, shard: int) -> ExchangeDaemon:
    table = config.exchange
    daemon = ExchangeDaemon(
        folder_of(folder.exchange, shard),
        folder.endpoints,
        load_keys(folder.keys),
        host=table.host,
        port=table.port_of(shard),
        limits=Limits(
            budget_bytes=table.budget_mib * MIB,
            log_bytes=(table.log_mib or 4 * table.budget_mib) * MIB,
            durability=table.durability,
            per_prompt=table.successes_per_prompt,
            max_age_versions=table.max_age_versions,
        ),
        clock=time.monotonic,
        endpoint=endpoint_of(shard),
        sockets=local_folder(),
    )
    log.info(
        "exchange replayed its log",
        records=len(daemon.core.shelf),
        cut_bytes=daemon.log.cut_bytes,
        damaged=daemon.log.damaged,
        unreadable=daemon.unreadable,
    )
    return daemon


def _report(stat: Stat, telemetry: Telemetry) -> None:
    newest_step = max((shelf.newest.step for shelf in stat.shelves if shelf.newest is not None), default=0)
    values = list(metrics_of(stat).items())
    for start in range(0, len(values), MAX_VALUES):  # pairs grow with the square of the policies
        telemetry.metrics(newest_step, dict(values[start : start + MAX_VALUES]))


def metrics_of(stat: Stat) -> dict[str, float]:
    """The daemon's account as metrics."""
    values: dict[str, float] = {
        "exchange/records": sum(shelf.records for shelf in stat.shelves),
        "exchange/used_bytes": stat.used_bytes,
        "exchange/refused": sum(sum(shelf.refused.values()) for shelf in stat.shelves),
        "exchange/evicted": sum(sum(shelf.evicted.values()) for shelf in stat.shelves),
        "exchange/unserved_requests": stat.unserved,
        "exchange/log_bytes": stat.log_bytes,
        "exchange/unstored_puts": stat.unstored,
        "exchange/malformed": sum(stat.malformed.values()),
    }
    for flow in stat.flows:
        pair = f"{flow.source}/{flow.receiver}"
        values[f"exchange/flow_records/{pair}"] = flow.records
        values[f"exchange/flow_bytes/{pair}"] = flow.bytes
        values[f"exchange/flow_hit_rate/{pair}"] = flow.hits / max(1, flow.asked)
        values[f"exchange/flow_age_versions/{pair}"] = flow.mean_age_versions
    return values
