"""The exchange daemon of one run.

Owns: the records that policies share, and their file, `exchange/exchange.sqlite`.
Speaks: acknowledgements, deliveries and barrier states to learners and workers; metrics to the supervisor; /metrics to
    any HTTP client.
Waits for: messages, without a bound of its own: an idle exchange says so and costs nothing.
Unblocked by: any client.
If it dies: learners go on without its records and count that; the restarted daemon opens its file, and its clients
    find it again.
Memory: its budget and some 150 MB; at 512 MiB beyond the budget it ends. An admitted client can make the socket gather
    an endless message; the limit ends this process before memory runs out for all others on the machine.
"""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from mrl.config.replay_table import replay_of
from mrl.config.run_folder import RunFolder, local_folder
from mrl.config.schema import ExchangeTable, RunConfig
from mrl.exchange.daemon import ExchangeDaemon
from mrl.exchange.limits import MIB, Limits
from mrl.exchange.metrics import ExchangeCollector
from mrl.exchange.replay import Replay
from mrl.metrics.telemetry import Telemetry
from mrl.processes import role_runtime
from mrl.records.exchange_messages import Stat
from mrl.transport.endpoints import port_of, publish_endpoint, read_endpoint
from mrl.transport.keys import load_keys
from mrl.transport.server import check_address

ROLE = "exchange"
METRICS_ENDPOINT = "exchange-metrics"
ROUND_S = 0.2
REPORT_S = 2.0
MAX_VALUES = 500
MAX_READERS = 16
"""Readers of the metrics page that are served at a time."""
READER_S = 10.0
"""Seconds until a reader who sends nothing, or takes nothing, is disconnected."""
SPARE_BYTES = 512 * MIB
"""Bytes that may be allocated beyond the budget. Far above `BESIDE_BUDGET_BYTES`, since mapped memory that is never
touched counts too, such as stacks of threads."""

LOG_BYTES = 256 * MIB
"""Bytes beyond the budget that the file and its write-ahead log may have without a warning. A write-ahead log that
readers let begin anew has at most an eighth of this."""

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Serve until told to stop."""
    return role_runtime.run_role(run_folder, ROLE, "", _serve)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
    stop = role_runtime.stop_event()
    limit_memory(data_bytes() + config.exchange.budget_mib * MIB + SPARE_BYTES)
    telemetry = role_runtime.connect_telemetry(folder, ROLE, "", closing)
    daemon = _open(config, folder)
    closing.callback(daemon.close)
    collector = ExchangeCollector(daemon.stat(), time.monotonic)
    closing.enter_context(metrics_page(collector, config.exchange, folder))
    reload: list[int] = []  # not an Event: the thread that the handler interrupts may hold its lock
    signal.signal(signal.SIGHUP, lambda got, _frame: reload.append(got))
    telemetry.doing("serving")
    next_report_s, told_bytes = time.monotonic(), 0
    while not stop.is_set():
        daemon.round(ROUND_S)
        collector.beat()
        if reload:
            reload.clear()
            daemon.reload_keys()
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + REPORT_S
            stat = daemon.stat()
            collector.hand_over(stat)
            _report(stat, telemetry)
            told_bytes = tell_length(stat, told_bytes)
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
            durability=table.durability,
            successes_per_prompt=table.successes_per_prompt,
            max_age_versions=table.max_age_versions,
        ),
        clock=time.monotonic,
        sockets=local_folder(),
        replay=_replay(config),
    )
    if daemon.store.set_aside:
        log.error(
            "exchange file damaged: moved aside and replaced by a new one",
            damage=daemon.store.damage,
            records=daemon.store.num_lost,
            set_aside=str(daemon.store.set_aside),
        )
    log.info(
        "exchange file opened",
        path=str(daemon.store.path),
        records=len(daemon.core.index),
        unreadable=daemon.store.num_unreadable,
    )
    if daemon.replayed is not None:
        log.info("exchange loaded the records of another run", **daemon.replayed._asdict())
    return daemon


def _replay(config: RunConfig) -> Replay | None:
    """Return the ended run whose records the exchange begins with; None where the configuration names none."""
    table = replay_of(config.sharing)
    if table is None:
        return None
    sources = dict(zip(table.policies, table.sources, strict=True))
    return Replay(RunFolder(Path(table.run)).exchange, sources, table.max_age_versions)


@contextmanager
def metrics_page(collector: ExchangeCollector, table: ExchangeTable, folder: RunFolder) -> Iterator[str]:
    """Serve /metrics, publish the address and yield it; "" when the configuration wants no page.

    With `metrics_port` = 0, the port of the last daemon is taken if it is free, so that scrapers need not search.
    Raises AddressError when the configured port cannot be had.
    """
    host = table.metrics_host
    if not host:
        (folder.endpoints / f"{METRICS_ENDPOINT}.json").unlink(missing_ok=True)
        yield ""
        return
    check_address(host, table.metrics_port)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    previous = table.metrics_port or port_of(read_endpoint(folder.endpoints, METRICS_ENDPOINT))
    address = "0.0.0.0" if host == "*" else host
    page = make_wsgi_app(registry)
    try:
        server = make_server(address, previous, page, _PageServer, _PageRequest)
    except OSError:  # another process has the port by now
        server = make_server(address, table.metrics_port, page, _PageServer, _PageRequest)
    thread = threading.Thread(target=server.serve_forever, name="metrics-page", daemon=True)
    thread.start()
    url = f"http://{host}:{server.server_port}"
    publish_endpoint(folder.endpoints, METRICS_ENDPOINT, f"tcp://{host}:{server.server_port}")
    log.info("exchange serves its metrics", url=f"{url}/metrics")
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _PageServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each of a few readers: readers need no key, and their threads are this daemon's."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_READERS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a reader in a thread of its own, or disconnect the reader where MAX_READERS are served."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be made
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one reader."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a reader who leaves or is slow is no news."""


class _PageRequest(WSGIRequestHandler):
    timeout = READER_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: scrapers read the page all the time."""


def data_bytes() -> int:
    """Return the bytes that this process has allocated; on a machine of many cores libraries alone take gigabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """Limit the memory that this process may allocate to `num_bytes`; a lower limit that is in force stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > num_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def _report(stat: Stat, telemetry: Telemetry) -> None:
    newest_step = max(
        (policy_stat.newest.step for policy_stat in stat.policies if policy_stat.newest is not None), default=0
    )
    values = list(metrics_of(stat).items())
    for start in range(0, len(values), MAX_VALUES):  # pairs of policies grow with the square of their number
        telemetry.metrics(newest_step, dict(values[start : start + MAX_VALUES]))


def tell_length(stat: Stat, told_bytes: int) -> int:
    """Warn when a reader that never ends keeps the write-ahead log from beginning anew; again when the file doubles.

    Returns the file's length in bytes at the last warning; 0 while there is nothing to warn of.
    """
    if stat.file_bytes < stat.budget_bytes + LOG_BYTES:
        return 0
    if stat.file_bytes < 2 * told_bytes:
        return told_bytes
    log.warning(
        "exchange file keeps growing: another program has had it open for reading too long",
        mib=stat.file_bytes // MIB,
        cure="close the program that has exchange.sqlite open, such as a notebook with an unfinished query",
    )
    return stat.file_bytes


def metrics_of(stat: Stat) -> dict[str, float]:
    """Return the daemon's counts as metrics."""
    values: dict[str, float] = {
        "exchange/records": sum(policy_stat.records for policy_stat in stat.policies),
        "exchange/used_bytes": stat.used_bytes,
        "exchange/refused": sum(sum(policy_stat.refused.values()) for policy_stat in stat.policies),
        "exchange/evicted": sum(sum(policy_stat.evicted.values()) for policy_stat in stat.policies),
        "exchange/unserved_requests": stat.unserved,
        "exchange/file_bytes": stat.file_bytes,
        "exchange/unstored_puts": stat.unstored,
        "exchange/abandoned_deliveries": stat.abandoned,
        "exchange/malformed": sum(stat.malformed.values()),
    }
    for flow in stat.flows:
        pair = f"{flow.source}/{flow.receiver}"
        values[f"exchange/flow_records/{pair}"] = flow.records
        values[f"exchange/flow_bytes/{pair}"] = flow.bytes
        values[f"exchange/flow_hit_rate/{pair}"] = flow.hits / max(1, flow.asked)
        values[f"exchange/flow_age_versions/{pair}"] = flow.mean_age_versions
    return values
