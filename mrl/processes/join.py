"""The supervisor of a host other than the first: starts, watches and ends the roles that the plan puts there.

Owns: the processes of this host.
Speaks: the records of its roles, its own heartbeat and reports to the first host's supervisor.
Waits for: the first order, at most `--wait-s`; then telemetry of its roles, at most a turn.
Unblocked by: orders of the first host, telemetry, child exits, signals, time.
If it dies: the kernel kills every child; the first host, or the person who started it, starts it again.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import setproctitle

from mrl.config.file_modes import check_writers, limit_modes
from mrl.config.run_folder import RunFolder, read_run_config, socket_file
from mrl.config.schema import RunConfig
from mrl.errors import PeerLost, RecordError
from mrl.metrics.host_load import HostLoad
from mrl.metrics.telemetry import Telemetry
from mrl.processes import role_runtime
from mrl.processes.children import is_forked, start_forks
from mrl.processes.host_processes import HostProcesses
from mrl.processes.memory_use import process_values
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.planning.hosts import host_environment, parse_hosts
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.local_folder import local_folder_of
from mrl.processes.planning.plan import HOST_ROLE, Plan, build_plan
from mrl.processes.planning.unit_workers import check_cores, units_of
from mrl.processes.preparation.hub_data import check_data_here
from mrl.processes.preparation.hub_models import check_here, located
from mrl.processes.supervisor import MEMORY_EVERY_S, TURN_S, catch_signals, may_send
from mrl.processes.unit_node import lease_units
from mrl.records.codec import decode, encode
from mrl.records.host_messages import (
    MAX_LINE_CHARS,
    MAX_LINES,
    HostOrder,
    HostReport,
    InboxRecord,
    host_order_decoder,
    inbox_decoder,
)
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord
from mrl.transport.background import BackgroundClient
from mrl.transport.endpoints import HOST, publish_endpoint
from mrl.transport.keys import load_keys
from mrl.transport.requests import RequestLink, Requests
from mrl.transport.server import ServerSocket

REPORT_S = 0.5
POLL_S = 0.1
LOST = 75
"""Exit code when the first host was lost; a new try may succeed (EX_TEMPFAIL)."""


def main(run_folder: Path, host: str, wait_s: float) -> int:
    """Serve a run on this host to its end. Raises PeerLost when its first host is not heard of within `wait_s`."""
    setproctitle.setproctitle(f"mrl::{HOST_ROLE}/{host}")
    os.environ[HOST] = host  # before any look-up of an endpoint: its socket file counts only on the same host
    signals: list[int] = []
    restore = catch_signals(signals)
    deadline_s = time.monotonic() + wait_s
    try:
        with ExitStack() as closing:
            folder = RunFolder(run_folder)
            _await_run(folder, signals, deadline_s, wait_s)
            uplink = Uplink(folder, host, closing)
            order = uplink.first_order(signals, deadline_s, wait_s)
            if order is None or order.phase == "stopping":
                return 128 + signals[0] if signals else 0
            return JoinedHost(folder, host, uplink, order, signals=signals, closing=closing).run()
    finally:
        restore()


def _await_run(folder: RunFolder, signals: list[int], deadline_s: float, wait_s: float) -> None:
    """Wait until the run exists: a job that joins may start before the job that makes the run."""
    while not signals and not (folder.endpoints / "telemetry.json").exists():
        if time.monotonic() > deadline_s:
            raise PeerLost(
                f"{folder.path}: no run appeared within {wait_s:g} s; all hosts of a run must share this folder"
            )
        time.sleep(POLL_S)


class Uplink:
    """The link to the first host: holds the newest order, sends reports and lines for people. It is also a `Told`."""

    def __init__(self, folder: RunFolder, host: str, closing: ExitStack) -> None:
        self.host, self.session = host, secrets.token_hex(4)
        self.order: HostOrder | None = None
        self.heard_s = time.monotonic()
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._reported_s = -REPORT_S
        identity = f"{HOST_ROLE}/{host}/{self.session}"
        self._requests = RequestLink("the first host", Requests())
        self.client: BackgroundClient = role_runtime.link(
            folder,
            "telemetry",
            identity=identity,
            on_message=self._take,
            on_tick=self._requests.on_tick,
            closing=closing,
        )
        self._requests.open(self.client.post, self.client.request_reconnect)  # relayed records stay queued
        self._telemetry = Telemetry(f"{HOST_ROLE}/{host}", "", lambda record: self.client.post(encode(record)))
        self._telemetry.doing("supervising", host)

    def event(self, text: str, now_s: float) -> None:
        """Tell of an event of a role."""
        self.line(text)

    def line(self, text: str) -> None:
        """Tell one line as it is."""
        self._lines.append(text[:MAX_LINE_CHARS])

    def first_order(self, signals: list[int], deadline_s: float, wait_s: float) -> HostOrder | None:
        """Return the first order other than "wait"; None after a signal. Raises PeerLost, see `main`."""
        while not signals:
            order = self.order
            if order is not None and order.phase != "wait":
                return order
            if time.monotonic() > deadline_s:
                reason = "still waits for an earlier supervisor of this host" if order else "has not answered"
                raise PeerLost(f"the first host {reason} after {wait_s:g} s")
            self.report(HostReport(host=self.host, session=self.session), time.monotonic())
            time.sleep(POLL_S)
        return None

    def report(self, report: HostReport, now_s: float, *, is_last: bool = False) -> None:
        """Send a report with the lines since the last report, and a heartbeat, if REPORT_S have passed or `is_last`."""
        if now_s - self._reported_s < REPORT_S and not is_last:
            return
        self._reported_s = now_s
        lines, self._lines = list(self._lines), deque(maxlen=MAX_LINES)
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        self._requests.report(encode(HostReport(**fields | {"lines": lines})), now_s)
        self.client.post(encode(self._telemetry.beat()))

    def measure(self, num_restarts: int, load: dict[str, float]) -> None:
        """Send the memory and number of this host's processes, and the host's load, as metrics."""
        self._telemetry.metrics(0, process_values(num_restarts) | load)

    def _take(self, body: bytes) -> None:
        order = self._requests.read(body, host_order_decoder)
        if order is not None:
            self.order, self.heard_s = order, time.monotonic()
            self._requests.answered(self._requests.core.newest_report, self.heard_s)


class JoinedHost:
    """The roles of this host, run under the orders of the first host."""

    def __init__(
        self, folder: RunFolder, host: str, uplink: Uplink, order: HostOrder, *, signals: list[int], closing: ExitStack
    ) -> None:
        """Raises ConfigError when this host lacks GPUs of the plan, cores of a unit, or room for a local folder."""
        check_writers(folder.path)
        config = read_run_config(folder.path)
        closing.callback(os.umask, limit_modes(config))
        closing.enter_context(local_folder_of(config))
        check_cores(units_of(config, host, is_first=False), where=f"host {host}")
        self._uplink, self._signals, self._alone_s = uplink, signals, config.launch.alone_s
        self._plan = plan = _plan(config, folder, host, order)
        self._lifecycle = Lifecycle(
            learners=plan.learners,
            stop_s=config.supervision.stop_s,
        )
        self._own = {spec.name for spec in plan.started_by(host)}
        served = {spec.policy for spec in plan.started_by(host) if spec.policy}
        check_here(located(config), sorted(served), folder.path)
        if served:
            check_data_here(config, folder.path)
        inbox_name = f"telemetry-{host}"
        # Only roles of this host send to the inbox.
        self._inbox = ServerSocket(
            load_keys(folder.keys),
            admits=lambda grant: grant.role not in ("admin", HOST_ROLE),
            ipc_path=socket_file("telemetry"),
        )
        closing.callback(self._inbox.close)
        publish_endpoint(folder.endpoints, inbox_name, self._inbox.address, self._inbox.ipc_path)
        os.environ.update(host_environment(next(one for one in plan.hosts if one.name == host)))
        os.environ[role_runtime.TELEMETRY] = inbox_name
        attempt = folder.logs / order.attempt
        forks = None
        if any(map(is_forked, plan.started_by(host))):
            forks = start_forks()
            closing.callback(forks.close)
        self._processes = HostProcesses(
            plan.started_by(host),
            table=config.supervision,
            is_sync=config.run.sync,
            lifecycle=self._lifecycle,
            attempt=attempt,
            crash=folder.crash,
            told=uplink,
            life=f"{order.attempt}-{uplink.session}",
            forks=forks,
        )
        lease_units(config, folder, self._processes, self._lifecycle, host=host, is_first=False, closing=closing)
        self._measure_s = 0.0
        every_s = config.supervision.host_metrics_s
        self._load = HostLoad(folder.path, visible_gpus(os.environ), host=host, every_s=every_s)
        closing.callback(self._load.close)

    def run(self) -> int:
        """Serve until the run ends; returns the exit code."""
        try:
            while not self._processes.is_over:
                self._turn(time.monotonic())
        finally:
            self._processes.kill_all()
            self._report(time.monotonic(), is_last=True)
        return self._lifecycle.exit_code

    def _turn(self, now_s: float) -> None:
        parts: tuple[Callable[[float], None], ...] = (
            self._relay, self._note_signals, self._obey, *self._processes.parts(), self._measure, self._report
        )  # fmt: skip
        for part in parts:
            try:
                part(time.monotonic())
            except OSError as error:  # the disk is full, or no process can be made; the rest must still be ended
                self._lifecycle.end(2, f"{error.strerror}: {error.filename}", now_s)
        self._processes.signal_all(time.monotonic())

    def _relay(self, now_s: float) -> None:
        """Note heartbeats and steps of this host's roles, and forward their records unchanged to the first host."""
        for client, body, grant in self._inbox.receive(TURN_S):
            try:
                record: InboxRecord = decode(body, inbox_decoder)
            except RecordError:
                continue
            if not may_send(grant, record):
                continue
            if isinstance(record, HeartbeatRecord):
                self._processes.heard(record.role, record.monotonic_s, now_s)
                self._inbox.send(client, body)  # tells the role that every earlier message has arrived
            elif isinstance(record, MetricsRecord):
                self._processes.reached(record.role, record.step)
            self._uplink.client.post(body)

    def _note_signals(self, now_s: float) -> None:
        while self._signals:
            self._lifecycle.interrupted(self._signals.pop(0), now_s)

    def _obey(self, now_s: float) -> None:
        order = self._uplink.order
        if now_s - self._uplink.heard_s > self._alone_s:
            self._lifecycle.end(LOST, f"the first host has been silent for {self._alone_s:g} s", now_s)
        if order is None:
            return
        for learner in set(order.done) - self._lifecycle.done:
            self._lifecycle.finished(learner, now_s)
        for policy in set(order.stopped) - self._lifecycle.stopped:
            self._lifecycle.stop(policy, now_s)
        if order.phase == "stopping":
            self._lifecycle.end(0, "the run is ending", now_s)

    def _measure(self, now_s: float) -> None:
        if now_s >= self._measure_s:
            self._measure_s = now_s + MEMORY_EVERY_S
            self._uplink.measure(self._processes.num_restarts, self._load.take())

    def _report(self, now_s: float, *, is_last: bool = False) -> None:
        lifecycle = self._lifecycle
        failed = lifecycle.exit_code if lifecycle.exit_code in (1, 2) else 0
        report = HostReport(
            host=self._uplink.host,
            session=self._uplink.session,
            done=sorted(lifecycle.done & self._own),
            ended=sorted(self._processes.without(lifecycle.stopped)),
            is_over=is_last,
            end_code=failed,
            end_reason=lifecycle.reason[:MAX_LINE_CHARS] if failed else "",
        )
        self._uplink.report(report, now_s, is_last=is_last)


def _plan(config: RunConfig, folder: RunFolder, host: str, order: HostOrder) -> Plan:
    hosts = parse_hosts(",".join(order.hosts))
    return build_plan(config, folder.path, gpus=visible_gpus(os.environ), hosts=hosts, here=host)
