"""The supervisor of another host against a scripted first host: real sockets and keys, tiny children for roles."""

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mrl.config.run_folder import RunFolder, create_run_folder, read_run_config
from mrl.config.task_tables import TaskTable
from mrl.errors import ConfigError, MissingError, PeerLost
from mrl.metrics.telemetry import Telemetry
from mrl.processes import join, role_runtime
from mrl.processes.planning.hosts import Host
from mrl.processes.planning.plan import Plan, ProcessSpec
from mrl.records.codec import decode, encode
from mrl.records.host_messages import HostOrder, HostReport, inbox_decoder
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys
from mrl.transport.requests import SILENCE_S
from mrl.transport.server import ServerSocket
from tests.support.word_runs import word_run

FOREVER = "import time\nwhile True: time.sleep(60)"


class FirstHost:
    """Answers every report by `order`, on a thread; keeps what it heard."""

    def __init__(self, folder: RunFolder, phase: str = "running", **fields: list[str]) -> None:
        self.order = HostOrder(phase=phase, attempt="attempt_1", hosts=["h0", "h1"], **fields)  # type: ignore[arg-type]
        self.reports: list[HostReport] = []
        self.beats: set[str] = set()
        self.measured: set[str] = set()
        """Names of metrics."""
        self.is_mute = False
        keys = create_keys(folder.keys, [Grant("learner", "b"), Grant("worker", "b")])
        self._server = ServerSocket(keys)
        publish_endpoint(folder.endpoints, "telemetry", self._server.address, self._server.ipc_path)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            for client, body, _grant in self._server.receive(0.05):
                record = decode(body, inbox_decoder)
                if isinstance(record, HostReport):
                    self.reports.append(record)
                    if not self.is_mute:
                        self._server.send(client, encode(self.order))
                elif isinstance(record, HeartbeatRecord):
                    self.beats.add(record.role)
                elif isinstance(record, MetricsRecord):
                    self.measured |= record.values.keys()
        self._server.close()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with policies a on h0 and b on h1; whatever joining sets in the environment is taken back."""
    for name in ("MRL_HOST", "MRL_ADDRESS", "MRL_TELEMETRY"):
        monkeypatch.setenv(name, "")
    config = word_run(
        {"a": {}, "b": {}},
        run={"folder": str(tmp_path), "min_free_mib": 0},
        exchange={"host": "0.0.0.0"},
        supervision={"stop_s": 1.0, "backoff_s": 0.01, "host_metrics_s": 0.05},
        launch={"alone_s": 1.0},
    )
    made = create_run_folder(config)
    (made.logs / "attempt_1").mkdir()
    return made


def plan_of(monkeypatch: pytest.MonkeyPatch, **code: str) -> None:
    """Let host h1 have these processes."""

    def spec(name: str, text: str) -> ProcessSpec:
        role, _, policy = name.partition("_")
        return ProcessSpec(
            name=f"{role}/{policy}",
            role=role,
            policy=policy,
            index=0,
            argv=(sys.executable, "-S", "-c", text),
            host="h1",
            restart="until_done" if role == "learner" else "always",
        )

    plan = Plan(tuple(spec(name, text) for name, text in code.items()), (Host("h0"), Host("h1")))
    monkeypatch.setattr(join, "_plan", lambda *_: plan)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "waited 120 s in vain"
        time.sleep(0.02)


def joined(folder: RunFolder, wait_s: float = 120.0) -> tuple[threading.Thread, list[int]]:
    """Join as h1 on a thread; signals belong to the main thread and are left out."""
    codes: list[int] = []

    def serve() -> None:
        with ExitStack() as closing:
            uplink = join.Uplink(folder, "h1", closing)
            order = uplink.first_order([], time.monotonic() + wait_s, wait_s)
            assert order is not None
            codes.append(join.JoinedHost(folder, "h1", uplink, order, signals=[], closing=closing).run())

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, codes


def test_it_starts_its_roles_reports_and_ends_with_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished learner is told to the first host, which ends the run; nothing is left."""
    plan_of(monkeypatch, learner_b="pass", worker_b=FOREVER)
    monkeypatch.setattr(join, "MEMORY_EVERY_S", 0.05)
    first = FirstHost(folder)
    try:
        thread, codes = joined(folder)
        until(lambda: any(report.done == ["learner/b"] for report in first.reports))
        assert "supervisor/h1" in first.beats
        until(lambda: "host/cpu_share/h1" in first.measured)
        first.order = HostOrder(phase="stopping", attempt="attempt_1", hosts=["h0", "h1"])
        thread.join(120)
        until(lambda: first.reports[-1].is_over)
        assert codes == [0]
        assert (folder.logs / "attempt_1" / "worker-b.log").exists()
    finally:
        first.close()


def test_heartbeats_go_back_to_the_roles_of_the_host(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on to the first host."""
    plan_of(monkeypatch, worker_b=FOREVER)
    first = FirstHost(folder)
    back: queue.Queue[bytes] = queue.Queue()
    try:
        thread, _ = joined(folder)
        until(lambda: (folder.endpoints / "telemetry-h1.json").exists())
        with ExitStack() as closing:
            role = role_runtime.link(
                folder, "telemetry-h1", identity="worker/b/0", on_message=back.put, closing=closing
            )
            heartbeat = encode(Telemetry("worker/b/0", "b", lambda _: None).beat())
            role.post(heartbeat)
            assert back.get(timeout=120) == heartbeat
        until(lambda: "worker/b/0" in first.beats)
        first.order = HostOrder(phase="stopping", attempt="attempt_1", hosts=["h0", "h1"])
        thread.join(120)
    finally:
        first.close()


def test_a_first_host_that_moved_is_found_and_what_was_relayed_meanwhile_comes_with_it(folder: RunFolder) -> None:
    """One that answers is never looked for."""
    first = FirstHost(folder)
    with capture_logs() as logs, ExitStack() as closing:
        closing.callback(first.close)
        uplink = join.Uplink(folder, "h1", closing)

        def report_until(condition: Callable[[], object]) -> None:
            until(lambda: uplink.report(HostReport(host="h1", session="s"), time.monotonic()) or condition())

        end_s = time.monotonic() + SILENCE_S + 1.0
        report_until(lambda: time.monotonic() > end_s)
        assert [line for line in logs if line["event"] == "no answer"] == []
        first.close()
        uplink.line("it went on")
        report_until(lambda: any(line["event"] == "no answer" for line in logs))
        second = FirstHost(folder)
        closing.callback(second.close)
        report_until(lambda: any(line["event"] == "answers again" for line in logs))
        until(lambda: any("it went on" in report.lines for report in second.reports))
    assert {line["whom"] for line in logs if line["event"] == "no answer"} == {"the first host"}


def test_nothing_starts_while_an_earlier_session_may_live(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is to wait; the wait has a bound."""
    plan_of(monkeypatch, learner_b=f"open({str(folder.path / 'began')!r}, 'w')")
    first = FirstHost(folder, "wait")
    try:
        with ExitStack() as closing, pytest.raises(PeerLost, match="earlier supervisor of this host"):
            join.Uplink(folder, "h1", closing).first_order([], time.monotonic() + 1.0, 1.0)
        assert not (folder.path / "began").exists()
    finally:
        first.close()


def test_a_role_that_gives_up_there_ends_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason reaches the first host; the exit code is that of the role."""
    plan_of(monkeypatch, learner_b=FOREVER, worker_b="import sys; sys.exit('no such task')")
    first = FirstHost(folder)
    try:
        thread, codes = joined(folder)
        thread.join(120)
        failed = [report for report in first.reports if report.end_code]
        assert codes == [1]
        assert "worker/b" in failed[0].end_reason
        assert any("starts again" in line for report in first.reports for line in report.lines)
    finally:
        first.close()


@pytest.mark.parametrize("told", [{"done": ["learner/b"]}, {"stopped": ["b"]}])
def test_learners_that_are_done_and_policies_that_were_stopped_do_not_start(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, told: dict[str, list[str]]
) -> None:
    """A supervisor that was started again learns it from its first order; what else lives there starts."""
    mark, other = folder.path / "began", folder.path / "other"
    plan_of(monkeypatch, learner_b=f"open({str(mark)!r}, 'a')", learner_a=f"open({str(other)!r}, 'a')\n{FOREVER}")
    first = FirstHost(folder, **told)
    try:
        thread, codes = joined(folder)
        until(other.exists)
        if "stopped" in told:
            until(lambda: any(report.ended == ["b"] for report in first.reports))
        first.order = HostOrder(phase="stopping", attempt="attempt_1", hosts=["h0", "h1"])
        thread.join(120)
        assert codes == [0]
        assert not mark.exists()
    finally:
        first.close()


def test_a_first_host_that_is_gone_ends_it_within_the_bound(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its roles must not go on under a supervisor that may be started elsewhere; the exit code asks to try again."""
    plan_of(monkeypatch, learner_b=FOREVER)
    first = FirstHost(folder)
    try:
        thread, codes = joined(folder)
        until(lambda: len(first.reports) > 3)
        first.is_mute = True
        muted_s = time.monotonic()
        thread.join(120)
        assert codes == [join.LOST]
        assert time.monotonic() - muted_s > 0.9
    finally:
        first.close()


def test_a_run_that_does_not_come_is_awaited_with_a_bound(folder: RunFolder) -> None:
    """A job that joins may start first, but not wait for ever."""
    with pytest.raises(PeerLost, match=r"no run appeared within 0.2 s; all hosts of a run must share this folder"):
        join.main(folder.path, "h1", 0.2)


def test_a_host_looks_at_the_cores_of_its_own_units(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own alone: the first one's are not its affair."""
    plan_of(monkeypatch)
    config = read_run_config(folder.path)
    units = config.allocation.model_copy(update={"units": ["cpu:4001", "h1/cpu:4000"]})
    monkeypatch.setattr(join, "read_run_config", lambda _: config.model_copy(update={"allocation": units}))
    order = HostOrder(phase="running", attempt="attempt_1", hosts=["h0", "h1"])
    first = FirstHost(folder)
    try:
        with ExitStack() as closing:
            uplink = join.Uplink(folder, "h1", closing)
            with pytest.raises(ConfigError, match=r"host h1: allocation.units: this host has no core 4000"):
                join.JoinedHost(folder, "h1", uplink, order, signals=[], closing=closing)
    finally:
        first.close()


def test_a_host_without_the_data_set_says_how_to_get_it(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of its roles starts."""
    plan_of(monkeypatch, learner_b=FOREVER)
    config = read_run_config(folder.path)
    tasks = {"sums": TaskTable(source="jsonl", dataset="maker/sums", commit="0123456789" * 4)}
    monkeypatch.setattr(join, "read_run_config", lambda _: config.model_copy(update={"tasks": tasks}))
    order = HostOrder(phase="running", attempt="attempt_1", hosts=["h0", "h1"])
    first = FirstHost(folder)
    try:
        with ExitStack() as closing:
            uplink = join.Uplink(folder, "h1", closing)
            with pytest.raises(MissingError, match=rf"tasks\.sums: .*; cure: mrl fetch {folder.path} on this host"):
                join.JoinedHost(folder, "h1", uplink, order, signals=[], closing=closing)
    finally:
        first.close()
