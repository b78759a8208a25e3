"""The exchange daemon of one run.

Owns: the records that policies share, and their log, in `exchange/`.
Speaks: acknowledgements, deliveries and barrier states to learners and workers; metrics to the supervisor.
Waits for: messages, without a bound of its own: an idle exchange says so and costs nothing.
Unblocked by: any client.
If it dies: learners go on alone and count it; the restarted daemon replays its log, and its clients find it again.
"""

import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.exchange.daemon import MIB, ExchangeDaemon, Limits
from mrl.metrics.telemetry import Telemetry
from mrl.records.exchange import Stat
from mrl.roles import wiring
from mrl.transport.keys import load_keys

ROUND_S = 0.2
REPORT_S = 2.0

MAX_VALUES = 500

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Serve until told to stop."""
    return wiring.run_role(run_folder, "exchange", "", _serve)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
    stop = wiring.stop_event()
    telemetry = wiring.connect_telemetry(folder, "exchange", "", closing)
    daemon = _open(config, folder)
    reload = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: reload.set())
    telemetry.doing("serving")
    next_report_s = time.monotonic()
    try:
        while not stop.is_set():
            daemon.round(ROUND_S)
            if reload.is_set():
                reload.clear()
                daemon.reload_keys()
            if time.monotonic() >= next_report_s:
                next_report_s = time.monotonic() + REPORT_S
                _report(daemon.stat(), telemetry)
    finally:
        daemon.close()
    return 0


def _open(config: RunConfig, folder: RunFolder) -> ExchangeDaemon:
    table = config.exchange
    daemon = ExchangeDaemon(
        folder.exchange,
        folder.endpoints,
        load_keys(folder.keys),
        host=table.host,
        port=table.port,
        limits=Limits(
            budget_bytes=table.budget_mib * MIB,
            log_bytes=(table.log_mib or 4 * table.budget_mib) * MIB,
            durability=table.durability,
            per_prompt=table.successes_per_prompt,
            max_age_versions=table.max_age_versions,
        ),
        clock=time.monotonic,
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
