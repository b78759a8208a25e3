"""The supervisor: one loop that starts the roles of a run, keeps them alive, and ends them.

Owns: the child processes, the run folder, metrics.jsonl, the screen
Speaks: telemetry (receives only); signals
Waits for: telemetry, at most TURN_S per turn
Unblocked by: telemetry, child exits, SIGINT and SIGTERM, time
If it dies: the kernel kills every child; `mrl train --resume` continues from the checkpoints
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from mrl.config.run_folder import RunFolder, renew_rendezvous, start_attempt
from mrl.config.schema import RunConfig
from mrl.errors import RecordError
from mrl.launch.lifecycle import Lifecycle
from mrl.launch.log_lines import ERROR_PREFIX, loud_line
from mrl.launch.plan import Plan, ProcessSpec
from mrl.launch.restarts import EndRun, Exit, Finished, RestartPolicy, StartAgain, how_it_ended, is_silent
from mrl.metrics.jsonl import MetricsWriter, SampleWriter
from mrl.metrics.residuals import ResidualWriter
from mrl.metrics.timeline import TimelineWriter
from mrl.records.codec import decode
from mrl.records.telemetry import (
    HeartbeatRecord,
    MetricsRecord,
    ResidualsRecord,
    SampleRecord,
    SpansRecord,
    TelemetryRecord,
    telemetry_decoder,
)
from mrl.roles.children import Child
from mrl.roles.display import Display
from mrl.roles.footprint import footprint_of
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys
from mrl.transport.server import Incoming, ServerSocket

TURN_S = 0.1
MEMORY_EVERY_S = 5.0
STANDSTILL_S = 5.0
LAST_RESORT_S = 2.0


class Inbox(Protocol):
    """Where telemetry arrives; `mrl.transport.server.ServerSocket` in a run."""

    def receive(self, timeout_s: float) -> list[Incoming]:
        """Wait at most `timeout_s`, then take what is there."""


def open_inbox(folder: RunFolder, host: str, processes: Iterable[ProcessSpec]) -> ServerSocket:
    """Bind the telemetry socket of a run and publish where it is; keys that `processes` lack are made.

    Endpoints that an earlier attempt left are removed first. Raises AddressError when the host is not of this machine,
    RunFolderError when the keys cannot be made or used.
    """
    for stale in folder.endpoints.glob("*.json"):
        stale.unlink(missing_ok=True)
    keys = create_keys(folder.keys, (Grant(spec.role, spec.policy) for spec in processes))
    socket = ServerSocket(keys, admits=lambda grant: grant.role not in ("admin", "supervisor"), host=host)
    publish_endpoint(folder.endpoints, "telemetry", socket.address)
    return socket


def _may_say(grant: Grant, record: TelemetryRecord) -> bool:
    """Whether the record speaks for its sender: its role, and its policy where the sender has one."""
    is_own_role = isinstance(record, SampleRecord) or grant.covers(record.role)
    return is_own_role and grant.policy in ("", record.policy)


class Supervisor:
    """Runs one plan to its end. `run` returns the exit code; `reason` then says why, empty when all went well."""

    def __init__(self, config: RunConfig, folder: RunFolder, plan: Plan, *, inbox: Inbox, display: Display) -> None:
        self._table, self._folder, self._inbox, self._display = config.supervision, folder, inbox, display
        self._results = tuple(
            folder.evaluation / f"{spec.policy}-{config.run.steps}.json"
            for spec in plan.processes
            if spec.restart == "until_done"
        )
        self._attempt = start_attempt(folder)
        renew_rendezvous(folder)
        self._children = {spec.name: Child(spec, self._attempt / spec.log_name) for spec in plan.processes}
        self._restarts = RestartPolicy(config.supervision, sync=config.run.sync)
        self._lifecycle = Lifecycle(
            learners=frozenset(spec.name for spec in plan.processes if spec.restart == "until_done"),
            drain_s=config.supervision.drain_s,
            stop_s=config.supervision.stop_s,
            max_run_s=config.run.max_minutes * 60,
            started_s=time.monotonic(),
        )
        self._due_s: dict[str, float] = dict.fromkeys(self._children, 0.0)
        self._metrics = MetricsWriter(folder.metrics_jsonl)
        self._samples = SampleWriter(folder.rollouts)
        self._residuals = ResidualWriter(folder.residuals)
        self._timeline = TimelineWriter(folder.timeline_jsonl)
        self._signals: list[int] = []
        self._sent: signal.Signals | None = None
        self._sent_s = self._turned_s = time.monotonic()
        self._measure_s = 0.0
        self._newest_step = 0
        self.peak_pss_mib = 0.0
        self.num_malformed = 0

    @property
    def reason(self) -> str:
        """Why the run ended, when not because all learners were done."""
        return self._lifecycle.reason

    @property
    def attempt(self) -> Path:
        """Folder of this attempt's logs."""
        return self._attempt

    def run(self) -> int:
        """Start everything, go on until the run ends, and leave no process behind, whatever happens."""
        restore = self._catch_signals()
        try:
            with self._display:
                while not self._is_over():
                    self._turn(time.monotonic())
        finally:
            self._kill_all()
            restore()
            self._close_metrics()
        return self._lifecycle.exit_code

    def _close_metrics(self) -> None:
        try:
            self._metrics.close()
        except OSError as error:  # what could not be written before may be told only now
            if not self._lifecycle.exit_code:
                self._lifecycle.exit_code, self._lifecycle.reason = 2, self._disk_reason(error)

    def _turn(self, now_s: float) -> None:
        self._forgive_standstill(now_s)
        parts = (
            self._take_telemetry,
            self._note_signals,
            self._read_logs,
            self._reap,
            self._kill_silent,
            self._tick,
            self._start_due,
            self._measure,
        )
        for part in parts:
            try:
                part(time.monotonic())
            except OSError as error:  # the disk is full, or no process can be made; what is left must still be ended
                self._lifecycle.end(2, self._disk_reason(error), now_s)
        self._signal_all(time.monotonic())
        self._display.refresh(time.monotonic())

    def _disk_reason(self, error: OSError) -> str:
        return f"{error.strerror}: {error.filename or self._folder.path}"

    def _take_telemetry(self, _now_s: float) -> None:
        for _client, body, grant in self._inbox.receive(TURN_S):
            try:
                record: TelemetryRecord = decode(body, telemetry_decoder)
            except RecordError:
                self.num_malformed += 1
                continue
            if _may_say(grant, record):
                self._take(record, time.monotonic())
            else:
                self.num_malformed += 1

    def _take(self, record: TelemetryRecord, now_s: float) -> None:
        self._display.record(record, now_s)
        match record:
            case SampleRecord():
                try:
                    self._samples.write(record)
                except RecordError:
                    self.num_malformed += 1
            case ResidualsRecord():
                try:
                    self._residuals.write(record)
                except RecordError:
                    self.num_malformed += 1
            case SpansRecord():
                self._timeline.write(record)
            case HeartbeatRecord():
                self._metrics.write(record)
                child = self._children.get(record.role)
                # A beat that an earlier life of the role left in the queue says nothing about this one.
                if child and child.alive and record.time_unix_s >= child.started_unix_s:
                    child.beat_s = now_s
            case MetricsRecord():
                self._metrics.write(record)
                self._newest_step = max(self._newest_step, record.step)

    def _forgive_standstill(self, now_s: float) -> None:
        """When this process itself stood still (a stopped job, a sleeping laptop), nobody else was silent."""
        stood_s = now_s - self._turned_s
        self._turned_s = now_s
        if stood_s > STANDSTILL_S:
            for child in self._children.values():
                child.started_s += stood_s
                child.beat_s = None if child.beat_s is None else child.beat_s + stood_s

    def _note_signals(self, now_s: float) -> None:
        while self._signals:
            self._lifecycle.interrupted(self._signals.pop(0), now_s)

    def _read_logs(self, _now_s: float) -> None:
        for child in self._children.values():
            for line in map(loud_line, child.new_lines()):
                if line is not None:
                    self._display.line(f"[{child.spec.name}] {line}")

    def _reap(self, now_s: float) -> None:
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                self._read_logs(now_s)
                self._judge(name, child, code, now_s)

    def _judge(self, name: str, child: Child, code: int, now_s: float) -> None:
        spec = child.spec
        code, reason = child.account(code, free_bytes=shutil.disk_usage(self._attempt).free)
        until_done = spec.restart == "until_done"
        finished = until_done and code == 0
        if self._lifecycle.phase == "stopping":
            return
        if not finished and not self._lifecycle.restarts(spec.role, spec.policy) and code != 2:
            return
        match self._restarts.ended(Exit(name, spec.role, code, reason, until_done), now_s):
            case Finished():
                self._lifecycle.finished(name, now_s)
            case StartAgain(at_s):
                child.write_crash(self._folder.crash, code, reason, time.time())
                self._due_s[name] = at_s
                self._display.event(
                    f"{name} {how_it_ended(code)} ({reason}); starts again in {at_s - now_s:.1f} s", now_s
                )
            case EndRun(end_code, why):
                self._lifecycle.end(end_code, why, now_s)
                self._show_tail(child)
                child.write_crash(self._folder.crash, code, reason, time.time())

    def _show_tail(self, child: Child) -> None:
        for line in list(child.tail)[-10:]:
            self._display.line(f"[{child.spec.name}] | {line}")

    def _kill_silent(self, now_s: float) -> None:
        if self._lifecycle.phase == "stopping":
            return
        for name, child in self._children.items():
            if not child.alive:
                continue
            silent = is_silent(self._table, started_s=child.started_s, last_beat_s=child.beat_s, now_s=now_s)
            if silent:
                bound_s = self._table.start_s if silent == "start" else self._table.silence_s
                self._display.event(f"{name} is silent for more than {bound_s:g} s and is killed", now_s)
                child.tail.append(f"{ERROR_PREFIX}no heartbeat for more than {bound_s:g} s, killed by the supervisor")
                child.started_s = child.beat_s = now_s
                child.send(signal.SIGKILL)

    def _start_due(self, now_s: float) -> None:
        for name in [name for name, at_s in self._due_s.items() if at_s <= now_s]:
            del self._due_s[name]
            child = self._children[name]
            if self._lifecycle.restarts(child.spec.role, child.spec.policy):
                child.start(os.environ, now_s=now_s, now_unix_s=time.time())
                self._restarts.started(name, now_s)

    def _signal_all(self, now_s: float) -> None:
        due = self._lifecycle.due_signal(now_s)
        if due is not None and due != self._sent:
            self._sent, self._sent_s = due, now_s
            for child in self._children.values():
                child.send(due)

    def _is_over(self) -> bool:
        if self._sent is None:
            return False
        killed_long_ago = self._sent == signal.SIGKILL and time.monotonic() - self._sent_s > LAST_RESORT_S
        return killed_long_ago or not any(child.alive for child in self._children.values())

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.send(signal.SIGKILL)
        deadline_s = time.monotonic() + 1.0
        while any(child.alive and child.poll() is None for child in self._children.values()):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.01)

    def _tick(self, now_s: float) -> None:
        pending: list[str] = []
        missing: list[str] = []
        if self._lifecycle.phase == "draining":
            # In this order: the evaluator writes a result before it removes the request.
            pending = sorted(path.name for path in (self._folder.evaluation / "queue").glob("*.json"))
            missing = [path.name for path in self._results if not path.exists()]
        self._lifecycle.tick(now_s, pending=pending, missing=missing)

    def _measure(self, now_s: float) -> None:
        if now_s < self._measure_s:
            return
        self._measure_s = now_s + MEMORY_EVERY_S
        footprint = footprint_of(os.getpid())
        self.peak_pss_mib = max(self.peak_pss_mib, footprint.pss_mib)
        values = {
            "process/pss_mib": footprint.pss_mib,
            "process/count": float(footprint.num_processes),
            "process/restarts": float(self._restarts.num_restarts),
        }
        record = MetricsRecord(
            role="supervisor", policy="", step=self._newest_step, time_unix_s=time.time(), values=values
        )
        self._take(record, now_s)

    def _catch_signals(self) -> Callable[[], None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda got, _frame: self._signals.append(got)) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore
