"""The supervisor: one loop that starts the roles of a run, keeps them alive, and ends them.

Owns: the child processes, the run folder, metrics.jsonl, the screen
Speaks: telemetry (receives), orders to the supervisors of other hosts; signals
Waits for: telemetry, at most TURN_S per turn
Unblocked by: telemetry, child exits, SIGINT and SIGTERM, requests of `mrl stop`, time
If it dies: the kernel kills every child, other hosts end theirs; `--resume` continues from the checkpoints
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from mrl.config.run_folder import RunFolder, socket_file, start_attempt
from mrl.config.schema import RunConfig
from mrl.config.stop_request import StopRequest, clear_requests, is_ended, note_ended, take_requests
from mrl.errors import RecordError
from mrl.files import DISK_FULL
from mrl.fork_server import ForkServer
from mrl.metrics.host_load import HostLoad
from mrl.metrics.jsonl import MetricsWriter, SampleWriter
from mrl.metrics.timeline import TimelineWriter
from mrl.metrics.unconfirmed_metrics import UnconfirmedMetricsReader
from mrl.processes.display import Display
from mrl.processes.host_processes import HostProcesses
from mrl.processes.memory_use import process_values
from mrl.processes.other_hosts import OtherHosts
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import Plan, ProcessSpec
from mrl.processes.trackers import FINISH_S, Trackers
from mrl.processes.unit_node import lease_units
from mrl.records.codec import decode, encode
from mrl.records.host_messages import HostReport, InboxRecord, inbox_decoder
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord, SpansRecord, TelemetryRecord
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys
from mrl.transport.server import ServerSocket

TURN_S = 0.1
MEMORY_EVERY_S = 5.0
REQUESTS_EVERY_S = 0.5
SIGNALLED = 128
"""Exit code of a run that a signal ended: this plus the signal's number."""
STOPPED = 3
"""Exit code of a run that `mrl stop` ended."""


def open_inbox(folder: RunFolder, host: str, processes: Iterable[ProcessSpec]) -> ServerSocket:
    """Bind the telemetry socket of a run, at a TCP address if `host` names one, and publish the address.

    Keys that `processes` lack are made. Endpoints of an earlier attempt are removed first. Raises AddressError when
    `host` is no address of this machine, RunFolderError when the keys cannot be made or used.
    """
    for stale in folder.endpoints.glob("*.json"):
        stale.unlink(missing_ok=True)
    keys = create_keys(folder.keys, (grant for spec in processes for grant in _grants(spec)))
    path = socket_file("telemetry")
    socket = ServerSocket(keys, admits=lambda grant: grant.role != "admin", host=host, ipc_path=path)
    publish_endpoint(folder.endpoints, "telemetry", socket.address, socket.ipc_path)
    return socket


def _grants(spec: ProcessSpec) -> list[Grant]:
    """Return the grants of a process; a learner's include its workers', which leases may start beyond the plan."""
    grants = [Grant(spec.role, spec.policy)]
    return [*grants, Grant("worker", spec.policy)] if spec.role == "learner" else grants


def may_send(grant: Grant, record: InboxRecord) -> bool:
    """Whether a record names its sender's own role, and the sender's policy where it has one.

    The supervisor of another host may send any record: it forwards those of its roles, which it has checked alike.
    """
    if grant.role == "supervisor" or isinstance(record, HostReport):
        return grant.role == "supervisor"
    is_own_role = isinstance(record, SampleRecord) or grant.covers(record.role)
    return is_own_role and grant.policy in ("", record.policy)


class RunFiles:
    """Writers of a run's telemetry; each record goes to the file of its kind."""

    def __init__(self, folder: RunFolder) -> None:
        self._metrics = MetricsWriter(folder.metrics_jsonl)
        self._samples = SampleWriter(folder.rollouts)
        self._timeline = TimelineWriter(folder.timeline_jsonl)
        self.left = UnconfirmedMetricsReader(folder.unheard, folder.metrics_jsonl)

    def write(self, record: TelemetryRecord) -> None:
        """Write one record. Raises RecordError when it names a place outside its folder, OSError on a full disk."""
        match record:
            case SampleRecord():
                self._samples.write(record)
            case SpansRecord():
                self._timeline.write(record)
            case HeartbeatRecord() | MetricsRecord():
                self._metrics.write(record)

    def close(self) -> None:
        """Write out what is buffered. Raises OSError, also for what could not be written before."""
        self._metrics.close()


class Supervisor:
    """Runs one plan to its end. `run` returns the exit code; `reason` then says why the run ended, "" on success."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        plan: Plan,
        *,
        inbox: ServerSocket,
        display: Display,
        forks: ForkServer | None = None,
    ) -> None:
        self._folder, self._inbox, self._display = folder, inbox, display
        self._policies = set(config.policies)
        self.attempt = start_attempt(folder)
        """Folder of this attempt's logs."""
        clear_requests(folder.path)
        self._lifecycle = Lifecycle(
            learners=plan.learners,
            stop_s=config.supervision.stop_s,
            max_run_s=config.run.max_minutes * 60,
            started_s=time.monotonic(),
        )
        self._processes = HostProcesses(
            plan.started_by(plan.first_host),
            table=config.supervision,
            is_sync=config.run.sync,
            lifecycle=self._lifecycle,
            attempt=self.attempt,
            crash=folder.crash,
            told=display,
            forks=forks,
        )
        self._closing = ExitStack()
        every_s = config.supervision.host_metrics_s
        self._load = HostLoad(folder.path, visible_gpus(os.environ), host=plan.first_host, every_s=every_s)
        self._closing.callback(self._load.close)
        lease_units(
            config,
            folder,
            self._processes,
            self._lifecycle,
            host=plan.first_host,
            is_first=True,
            closing=self._closing,
        )
        self._hosts = OtherHosts(
            plan, config.launch, self._lifecycle, display, attempt=self.attempt.name, now_s=time.monotonic()
        )
        self._files = RunFiles(folder)
        self._trackers = Trackers(config, folder, self.attempt)
        self._signals: list[int] = []
        self._measure_s = self._look_s = 0.0
        self._newest_step = 0
        self.peak_pss_mib = 0.0

    @property
    def reason(self) -> str:
        """Reason of the run's end; "" when all learners were done."""
        return self._lifecycle.reason

    def run(self) -> int:
        """Start the processes, supervise them until the run ends, and leave no process behind, whatever happens."""
        restore = catch_signals(self._signals)
        try:
            with self._display:
                while not (self._processes.is_over and self._hosts.are_over(time.monotonic())):
                    self._turn(time.monotonic())
        finally:
            self._processes.kill_all()
            self._closing.close()
            try:
                self._close_files()
            finally:
                restore()
        return self._lifecycle.exit_code

    def _close_files(self) -> None:
        for part in (lambda: self._take_left(time.monotonic()), self._close_trackers, self._files.close):
            try:
                part()
            except OSError as error:  # an earlier failed write may be reported only here
                if not self._lifecycle.exit_code:
                    self._lifecycle.exit_code, self._lifecycle.reason = 2, self._disk_reason(error)

    def _close_trackers(self) -> None:
        is_hurried = self._lifecycle.exit_code > SIGNALLED
        self._trackers.close(FINISH_S, is_hurried=lambda: is_hurried or bool(self._signals))
        for line in self._trackers.take_lines():
            self._display.line(line)
        if values := self._trackers.values():
            self._files.write(self._measured(values))

    def _turn(self, now_s: float) -> None:
        look = (self._take_telemetry, self._note_signals, self._note_requests, self._note_trackers)
        for part in (*look, *self._processes.parts(), self._hosts.tick, self._lifecycle.tick, self._measure):
            try:
                part(time.monotonic())
            except OSError as error:  # the disk is full, or no process can be made; the rest must still be ended
                self._lifecycle.end(2, self._disk_reason(error), now_s)
        self._processes.signal_all(time.monotonic())
        self._display.refresh(time.monotonic())

    def _disk_reason(self, error: OSError) -> str:
        cure = "; free disk space there, then continue with --resume" if error.errno in DISK_FULL else ""
        return f"{error.strerror}: {error.filename or self._folder.path}{cure}"

    def _take_telemetry(self, _now_s: float) -> None:
        for client, body, grant in self._inbox.receive(TURN_S):
            try:
                record: InboxRecord = decode(body, inbox_decoder)
            except RecordError:
                continue
            if not may_send(grant, record):
                continue
            if isinstance(record, HostReport):
                self._inbox.send(client, encode(self._hosts.answer(record, time.monotonic())))
            elif not (isinstance(record, MetricsRecord) and self._files.left.had(record)):
                self._take(record, time.monotonic())
                if isinstance(record, HeartbeatRecord) and grant.role != "supervisor":
                    self._inbox.send(client, body)  # tells the role that every earlier message has arrived

    def _take_left(self, now_s: float) -> None:
        self._files.left.take(lambda record: self._take(record, now_s))

    def _take(self, record: TelemetryRecord, now_s: float) -> None:
        self._display.record(record, now_s)
        with suppress(RecordError):  # it names a place outside its folder
            self._files.write(record)
        match record:
            case HeartbeatRecord():
                self._processes.heard(record.role, record.monotonic_s, now_s)
            case MetricsRecord():
                self._processes.reached(record.role, record.step)
                self._newest_step = max(self._newest_step, record.step)
                self._trackers.offer(record)

    def _note_trackers(self, now_s: float) -> None:
        for line in self._trackers.take_lines():
            self._display.event(line, now_s)

    def _note_signals(self, now_s: float) -> None:
        while self._signals:
            self._lifecycle.interrupted(self._signals.pop(0), now_s)

    def _note_requests(self, now_s: float) -> None:
        """Carry out requests of `mrl stop` from any host, and note which stopped policies have ended."""
        if now_s < self._look_s:
            return
        self._look_s = now_s + REQUESTS_EVERY_S
        self._take_left(now_s)
        for request in take_requests(self._folder.path):
            self._obey(request, now_s)
        for policy in self._processes.without(self._lifecycle.stopped):
            if self._hosts.have_ended(policy) and not is_ended(self._folder.path, policy):
                note_ended(self._folder.path, policy)

    def _obey(self, request: StopRequest, now_s: float) -> None:
        if not request.policy:
            self._lifecycle.end(STOPPED, f"stopped by {request.by}", now_s)
        elif request.policy in self._policies - self._lifecycle.stopped:
            self._lifecycle.stop(request.policy, now_s)
            self._display.event(f"{request.policy} is stopped by {request.by}", now_s)

    def _measure(self, now_s: float) -> None:
        if now_s < self._measure_s:
            return
        self._measure_s = now_s + MEMORY_EVERY_S
        values = process_values(self._processes.num_restarts)
        self.peak_pss_mib = max(self.peak_pss_mib, values["process/pss_mib"])
        self._take(self._measured(values | self._load.take() | self._trackers.values()), now_s)

    def _measured(self, values: dict[str, float]) -> MetricsRecord:
        return MetricsRecord(
            role="supervisor", policy="", step=self._newest_step, time_unix_s=time.time(), values=values
        )


def catch_signals(into: list[int]) -> Callable[[], None]:
    """Collect SIGINT, SIGTERM and SIGHUP in `into` until the returned function is called.

    A SIGHUP that is ignored already stays ignored: a program under `nohup` goes on when its terminal is closed.
    """
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = (signal.SIGINT, signal.SIGTERM) if is_kept else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _frame: into.append(got)) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore
