"""The supervisor's shell, with tiny real child processes in place of roles."""

import contextlib
import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from mrl.config.run_folder import create_run_folder
from mrl.config.schema import RunConfig, TrackerTable
from mrl.config.stop_request import file_stop_request
from mrl.fork_server import ForkServer
from mrl.metrics.jsonl import each_metrics
from mrl.metrics.timeline import read_timeline
from mrl.processes import host_processes, supervisor
from mrl.processes.children import Child, is_forked
from mrl.processes.display import Display, RunConsole
from mrl.processes.host_processes import STACKS_S
from mrl.processes.planning import restarts
from mrl.processes.planning.plan import Plan, ProcessSpec
from mrl.processes.planning.unit_workers import UNIT
from mrl.processes.supervisor import STOPPED, Supervisor, open_inbox
from mrl.processes.trackers import Trackers
from mrl.records.codec import encode
from mrl.records.telemetry_messages import (
    HeartbeatRecord,
    MetricsRecord,
    SampleRecord,
    Span,
    SpansRecord,
    TelemetryRecord,
)
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import load_client_keys
from mrl.transport.server import Incoming
from tests.support.word_runs import word_run

T = TypeVar("T")
FOREVER = "import time\nwhile True: time.sleep(60)"


class StillBoard:
    """A board that remembers what it was told."""

    def __init__(self) -> None:
        self.records: list[TelemetryRecord] = []
        self.notes: list[str] = []
        self.due: list[str] = []

    def apply(self, record: TelemetryRecord, now_s: float) -> None:
        self.records.append(record)

    def note(self, text: str, now_s: float) -> None:
        self.notes.append(text)

    def take_due(self) -> list[str]:
        due, self.due = self.due, []
        return due

    def render(self, now_s: float | None = None) -> str:
        return "board"

    def render_ended(self) -> str:
        return "what stays"

    def step_line(self, record: TelemetryRecord) -> str | None:
        return f"step {record.step}" if isinstance(record, MetricsRecord) and record.role == "learner/a" else None

    def heartbeat_line(self, now_s: float) -> str:
        return "heartbeat"

    def final_table(self) -> str:
        return "table"


class Script:
    """An inbox that calls `each_turn` once per turn and hands on what it returns, from `sender` or whom it names."""

    def __init__(self, each_turn: Callable[[], list[TelemetryRecord]] = list, sender: Grant | None = None) -> None:
        self._each_turn, self._sender = each_turn, sender
        self.sent: list[bytes] = []

    def receive(self, timeout_s: float) -> list[Incoming]:
        threading.Event().wait(min(timeout_s, 0.01))
        return [Incoming(b"c", encode(record), self._sender or _author(record)) for record in self._each_turn()]

    def send(self, client: bytes, body: bytes) -> bool:
        self.sent.append(body)
        return True


def _author(record: TelemetryRecord) -> Grant:
    return Grant("learner", "a") if isinstance(record, SampleRecord) else grant_of(record.role)


def python(name: str, code: str, *, restart: str = "always") -> ProcessSpec:
    role, _, policy = name.partition("/")
    argv = (sys.executable, "-S", "-c", code)
    return ProcessSpec(name=name, role=role, policy=policy, index=0, argv=argv, restart=restart)  # type: ignore[arg-type]


def learner(code: str) -> ProcessSpec:
    return python("learner/a", code, restart="until_done")


def config_in(folder: Path, *, max_minutes: float = 0.0, **supervision: float) -> RunConfig:
    run = {"folder": str(folder), "min_free_mib": 0, "max_minutes": max_minutes}
    return word_run({"a": {}, "b": {}}, run=run, supervision={"backoff_s": 0.01, **supervision})


class Run:
    """A supervisor over a scripted plan, with what it printed."""

    def __init__(
        self,
        folder: Path,
        *specs: ProcessSpec,
        each_turn: Callable[[], list[TelemetryRecord]] = list,
        told: Sequence[TelemetryRecord] = (),
        sender: Grant | None = None,
        resume: bool = False,
        forks: ForkServer | None = None,
        max_minutes: float = 0.0,
        **supervision: float,
    ) -> None:
        """`each_turn` is heard at every turn, `told` at the first one."""
        config = config_in(folder, max_minutes=max_minutes, **supervision)
        if told:
            turns = iter([list(told)])
            each_turn = lambda: next(turns, [])  # noqa: E731
        self.folder = create_run_folder(config, resume=resume)
        self.board, self.output = StillBoard(), io.StringIO()
        display = Display(self.board, RunConsole(file=self.output, width=200))
        plan = Plan(tuple(specs))
        self.inbox = Script(each_turn, sender)
        self.supervisor = Supervisor(config, self.folder, plan, inbox=self.inbox, display=display, forks=forks)

    def __call__(self) -> int:
        return self.supervisor.run()


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Whatever a test does, none of its processes may outlive it."""
    before = psutil.Process().children(recursive=True)
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert left == []


def test_all_learners_done_ends_the_other_roles_with_zero(tmp_path: Path) -> None:
    """A worker that runs for ever is ended once the learner has finished."""
    run = Run(tmp_path, learner("pass"), python("worker/a/0", FOREVER))
    assert run() == 0
    assert run.supervisor.reason == ""
    assert (run.folder.logs / "latest" / "worker-a-0.log").exists()


def test_a_crashed_worker_is_started_again(tmp_path: Path) -> None:
    """The second life of the worker lets the learner finish; the crash is told, counted and kept."""
    mark = tmp_path / "mark"
    crash_once = (
        f"import os, sys\n"
        f"if not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w').close(); sys.exit('ValueError: first life')\n"
        f"open({str(mark) + '2'!r}, 'w').close()\n{FOREVER}"
    )
    wait = f"import os, time\nwhile not os.path.exists({str(mark) + '2'!r}): time.sleep(0.01)"
    run = Run(tmp_path / "runs", learner(wait), python("worker/a/0", crash_once))
    assert run() == 0
    assert any("worker/a/0 exited with code 1 (ValueError: first life)" in note for note in run.board.notes)
    crash = json.loads((run.folder.crash / "worker-a-0.json").read_text())
    assert (crash["exit_code"], crash["reason"]) == (1, "ValueError: first life")


IMPORTED = """
import os, sys, time
import mrl.cli.main

def main(words):
    with open(os.environ["TOLD"], "a") as file:
        print(words[0], os.getppid() == server, "CUDA_VISIBLE_DEVICES" in os.environ, file=file)
    if words[0] == "worker":
        time.sleep(600)
    if "lives" in words:
        while open(os.environ["TOLD"]).read().count("worker") < 2:
            time.sleep(0.01)
        return 1 if len(open(os.environ["TOLD"]).readlines()) < 4 else 0
    while len(open(os.environ["TOLD"]).readlines()) < 3:
        time.sleep(0.01)
    return 0

server = os.getpid()
mrl.cli.main.main = main
"""
"""In place of mrl's commands: each process says whether it is a fork of the one that imported this."""


def role(name: str, *words: str, **env: str) -> ProcessSpec:
    spec = python(name, "", restart="until_done" if name.startswith("learner") else "always")
    return replace(spec, argv=(sys.executable, "-m", "mrl", spec.role, *words), env=env)


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """What roles are forks of; roles that are none import the same by `sitecustomize`."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(IMPORTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    server = ForkServer([], os.environ)
    yield server
    server.close()


def test_ranks_and_workers_on_the_cpu_are_forks(tmp_path: Path, forks: ForkServer) -> None:
    """In every life; what is shown a GPU, is on a unit or another program, such as torchrun, starts by itself."""
    specs = role("learner/a", "lives"), role("worker/a/0"), role("worker/b/0", CUDA_VISIBLE_DEVICES="0")
    run = Run(tmp_path / "runs", *specs, forks=forks)
    assert run() == 0
    told = sorted((tmp_path / "told").read_text().splitlines())
    assert told == ["learner True False"] * (len(told) - 2) + ["worker False True", "worker True False"]
    assert len(told) >= 4
    on_unit = replace(specs[1], env={UNIT: "cpu:0"})
    assert [is_forked(spec) for spec in (*specs, on_unit)] == [True, True, False, False]
    for argv in ((sys.executable, "-m", "torch.distributed.run", "-m", "mrl"), ("python", "-m", "mrl", "learner")):
        assert not is_forked(replace(specs[0], argv=argv))


def test_roles_start_without_what_they_would_be_forks_of(tmp_path: Path, forks: ForkServer) -> None:
    """Where it has died they import by themselves, and a person is told."""
    forks.close()
    run = Run(tmp_path / "runs", role("learner/a"), role("worker/a/0"), role("worker/b/0"), forks=forks)
    assert run() == 0
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["learner False False"] + ["worker False False"] * 2
    assert [note for note in run.board.notes if "fork server" in note] == [
        "the fork server died or hangs: from now on each process imports its own modules"
    ]


def test_exit_code_2_ends_the_run_with_that_line(tmp_path: Path) -> None:
    """A mistake that a person has to cure is not retried."""
    code = "import sys; sys.stderr.write('mrl: error: no such task\\n'); sys.exit(2)"
    run = Run(tmp_path, learner(FOREVER), python("worker/a/0", code))
    assert run() == 2
    assert run.supervisor.reason == "worker/a/0: no such task"
    assert "[worker/a/0] mrl: error: no such task" in run.output.getvalue()


def test_a_role_that_always_crashes_ends_the_run(tmp_path: Path) -> None:
    """After the allowed restarts the run ends with 1, the reason, and the last lines of the log."""
    run = Run(tmp_path, learner(FOREVER), python("exchange", "raise OSError('boom')"), max_restarts=2)
    assert run() == 1
    assert run.supervisor.reason == "exchange exited with code 1, after 2 restarts within 60 s: OSError: boom"
    assert "[exchange] | OSError: boom" in run.output.getvalue()


def test_a_host_of_units_that_is_lost_again_and_again_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again after a pause, as when a host reboots; the run goes to its end."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 1.0)
    tries, back = tmp_path / "tries", tmp_path / "back"
    code = (
        f"import sys\nopen({str(tries)!r}, 'a').write('x')\n"
        f"if len(open({str(tries)!r}).read()) < 4: sys.exit(255)\n"
        f"open({str(back)!r}, 'w').close()\n{FOREVER}"
    )
    wait = f"import os, time\nwhile not os.path.exists({str(back)!r}): time.sleep(0.01)"
    host = python("supervisor/n2", code, restart="spared")
    run = Run(tmp_path / "runs", learner(wait), host, max_restarts=2)
    assert run() == 0
    told = [note for note in run.board.notes if "supervisor/n2" in note]
    assert len(told) == 3
    assert "supervisor/n2 exited with code 255, after 2 restarts within 60 s (" in told[2]
    assert told[2].endswith("; starts again in 1.0 s")


def test_a_learner_under_torchrun_that_reports_2_ends_the_run(tmp_path: Path) -> None:
    """torchrun exits with 1; the code of its rank stands in its summary."""
    code = "import sys; sys.stderr.write('mrl: error: bad model\\n  exitcode  : 2 (pid: 5)\\n'); sys.exit(1)"
    run = Run(tmp_path, learner(code))
    assert run() == 2
    assert run.supervisor.reason == "learner/a: bad model"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_also_what_ignores_sigterm(tmp_path: Path, number: int, code: int) -> None:
    """Stubborn processes and grandchildren in sessions of their own are killed, none is left."""
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "c = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(c.pid)); time.sleep(600)"
    )

    def interrupt() -> list[TelemetryRecord]:
        pid = tmp_path / "pid"
        if pid.exists() and pid.read_text() and not (tmp_path / "sent").exists():
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), number)
        return []

    run = Run(tmp_path / "runs", learner(FOREVER), python("worker/a/0", stubborn), each_turn=interrupt, stop_s=0.2)
    assert run() == code
    grandchild = int((tmp_path / "pid").read_text())
    # It has been sent SIGKILL; on a busy machine the kernel takes a moment to end it.
    wait_for(lambda: not psutil.pid_exists(grandchild) or not is_running(psutil.Process(grandchild)) or None)


def test_a_terminal_that_is_closed_ends_no_run_that_was_started_to_outlive_it(tmp_path: Path) -> None:
    """`nohup` has SIGHUP ignored, and it stays so; others end by it."""
    code = "import time; time.sleep(0.3)"

    def hang_up() -> list[TelemetryRecord]:
        os.kill(os.getpid(), signal.SIGHUP)
        return []

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert Run(tmp_path / "ignored", learner(code), each_turn=hang_up)() == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert Run(tmp_path / "heard", learner(code), each_turn=hang_up)() == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_silent_role_writes_its_stacks_is_killed_and_started_again(tmp_path: Path) -> None:
    """A living process without heartbeats counts as hanging; its replacement gets a fresh bound."""
    lives, stacks = tmp_path / "lives", tmp_path / "stacks"
    hang = f"""
import faulthandler, signal, time
open({str(lives)!r}, 'a').write('x')
faulthandler.register(signal.SIGUSR1, file=open({str(stacks)!r}, "ab"))
def hangs_in_here():
    while True:
        time.sleep(60)
hangs_in_here()
"""
    wait = f"import os, time\nopen({str(lives)!r}, 'a')\nwhile os.path.getsize({str(lives)!r}) < 2: time.sleep(0.01)"
    specs = (learner(wait), python("worker/a/0", hang))
    speak: Callable[[], list[TelemetryRecord]] = lambda: [beat("learner/a", time.monotonic())]  # noqa: E731
    run = Run(tmp_path / "runs", *specs, each_turn=speak, start_s=1.5, max_restarts=100)
    assert run() == 0, run.board.notes
    assert any(note.startswith("worker/a/0 sent no heartbeat for more than 1.5 s") for note in run.board.notes)
    assert b"hangs_in_here" in stacks.read_bytes()


def test_the_successor_of_a_hanging_role_is_not_killed_in_its_place(tmp_path: Path) -> None:
    """The role ends by itself while it may write its stacks, and its next life is there before the kill is due."""
    lives = tmp_path / "lives"
    lives.touch()
    role = f"""
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
open({str(lives)!r}, "a").write("x")
{FOREVER}"""
    wait = f"import os, time\nwhile os.path.getsize({str(lives)!r}) < 2: time.sleep(0.01)\ntime.sleep({1.5 * STACKS_S})"

    def each_turn() -> list[TelemetryRecord]:
        alive = ["learner/a", "worker/a/0"] if lives.stat().st_size > 1 else ["learner/a"]
        return [beat(name, time.monotonic()) for name in alive]

    run = Run(
        tmp_path / "runs", learner(wait), python("worker/a/0", role), each_turn=each_turn, start_s=0.5, max_restarts=100
    )
    assert run() == 0, run.board.notes
    assert lives.read_text() == "xx"


def test_heartbeats_keep_a_role_alive(tmp_path: Path) -> None:
    """Roles that speak may take longer than both bounds; strangers are ignored.

    Nobody is silent by a clock that is set: the learner's dates are a day old. And the one that nobody sets counts from
    a host's boot, so what another host's says of the time means nothing: that host booted just now.
    """
    day_back_s = time.time() - 86_400

    def speak() -> list[TelemetryRecord]:
        now_s = time.monotonic()
        return [beat("learner/a", now_s, day_back_s), beat("allocator", now_s), beat("supervisor/b", 0.0)]

    specs = (learner("import time; time.sleep(1.2)"), python("supervisor/b", FOREVER))
    run = Run(tmp_path, *specs, each_turn=speak, silence_s=0.5, start_s=0.5)
    assert run() == 0
    assert run.board.notes == []


def test_a_learner_that_gets_no_further_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its lives are: here none is within a day of the next."""
    monkeypatch.setattr(restarts, "DAY_S", 0.0)
    run = Run(tmp_path, learner("raise SystemExit(1)"), each_turn=lambda: [METRICS])
    assert run() == 1
    assert "after 3 restarts without getting beyond step 7" in run.supervisor.reason


def test_a_beat_of_an_earlier_life_says_nothing_about_this_one(tmp_path: Path) -> None:
    """What a killed process left in the queue does not arm the limit of its successor, which is still starting."""
    turns = iter(range(10_000))
    stale = beat("worker/a/0", time.monotonic() - 100)
    specs = (learner("import time; time.sleep(0.8)"), python("worker/a/0", FOREVER))
    run = Run(tmp_path, *specs, each_turn=lambda: [stale] if next(turns) == 5 else [], silence_s=0.2, start_s=30.0)
    assert run() == 0
    assert run.board.notes == []


METRICS = MetricsRecord(role="learner/a", policy="a", step=7, time_unix_s=1.0, values={"reward/mean": 0.5})


def test_telemetry_reaches_metrics_samples_timeline_and_screen(tmp_path: Path) -> None:
    """Every kind of record goes where it belongs, and that of another policy nowhere; the tree's memory is measured."""
    sample = SampleRecord(policy="a", step=7, kind="rollout", task="t", prompt="p", completion="c", reward=1.0)
    spans = [Span(kind="training", began_unix_s=1.0, duration_s=2.0)]
    told = [
        METRICS,
        sample,
        msgspec.structs.replace(sample, policy="b"),
        SpansRecord(role="learner/a", policy="a", spans=spans),
    ]
    run = Run(tmp_path, learner("pass"), told=told)
    assert run() == 0
    lines = list(each_metrics(run.folder.metrics_jsonl))
    assert any(line["role"] == "learner/a" and line["step"] == 7 for line in lines)
    assert any(line["role"] == "supervisor" and line["values"]["process/pss_mib"] > 1 for line in lines)
    assert [path.name for path in (run.folder.rollouts / "step_7").iterdir()] == ["a.jsonl"]
    assert [(one.role, one.kind) for one in read_timeline(run.folder.timeline_jsonl)] == [("learner/a", "training")]
    assert "step 7" in run.output.getvalue()


def test_the_load_of_the_host_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in metrics.jsonl, by the supervisor, and nothing is measured once the run is over."""
    monkeypatch.setattr(supervisor, "MEMORY_EVERY_S", 0.05)
    run = Run(tmp_path, learner("import time; time.sleep(1.5)"), host_metrics_s=0.05)
    assert run() == 0

    told = [line["values"] for line in each_metrics(run.folder.metrics_jsonl) if line["role"] == "supervisor"]
    loads = [values for values in told if "host/cpu_share/here" in values]
    assert len(loads) > 1
    assert loads[-1]["host/disk_free_mib/here"] > 0
    assert run.supervisor._load._is_over.is_set()


def test_a_sample_that_names_no_policy_is_dropped(tmp_path: Path) -> None:
    """A policy that is a path is refused even from a role that may speak of all."""
    evil = SampleRecord(policy="../x", step=7, kind="rollout", task="t", prompt="p", completion="c", reward=1.0)
    run = Run(tmp_path, learner("pass"), told=[evil], sender=Grant("allocator"))
    assert run() == 0
    assert not list(tmp_path.rglob("x.jsonl"))


@pytest.mark.parametrize(
    ("sender", "num_taken"),
    [
        (Grant("learner", "a"), 2),
        (Grant("allocator"), 0),
        (Grant("worker", "a"), 0),
        (Grant("learner", "b"), 0),
    ],
    ids=["itself", "another role", "another role of the policy", "another policy"],
)
def test_nobody_speaks_for_another(tmp_path: Path, sender: Grant, num_taken: int) -> None:
    """A record under a role or policy that its sender's key does not cover is dropped."""
    run = Run(tmp_path, learner("pass"), told=[beat("learner/a", time.monotonic()), METRICS], sender=sender)
    assert run() == 0
    assert sum(record.role == "learner/a" for record in run.board.records) == num_taken


def test_the_inbox_makes_a_key_for_every_process_and_admits_the_roles(tmp_path: Path) -> None:
    """Opened again, as on --resume, it keeps the keys and makes those that a larger plan needs."""
    folder = create_run_folder(config_in(tmp_path))
    for specs in ([learner("")], [learner(""), replace(python("worker/a/0", ""), policy="a")]):
        inbox = open_inbox(folder, "127.0.0.1", specs)
        inbox.close()
        made = {spec.name: load_client_keys(folder.keys, grant_of(spec.name)) for spec in specs}
        if len(specs) == 1:
            first = made["learner/a"]
    assert made["learner/a"] == first
    admitted = [role for role in ("exchange", "allocator", "admin") if inbox._links._admits(Grant(role))]
    assert admitted == ["exchange", "allocator"]


def test_the_time_limit_ends_the_run_with_zero(tmp_path: Path) -> None:
    """run.max_minutes is a plan, not a failure."""
    run = Run(tmp_path, learner(FOREVER), max_minutes=0.002)
    assert run() == 0
    assert "max_minutes" in run.supervisor.reason


def test_a_request_ends_the_run_and_says_who_asked(tmp_path: Path) -> None:
    """What was asked of an earlier attempt is forgotten."""
    file_stop_request(create_run_folder(config_in(tmp_path)).path)
    turns = iter(range(10_000))

    def ask() -> list[TelemetryRecord]:
        if next(turns) == 20:
            file_stop_request(tmp_path / "r")
        return []

    run = Run(tmp_path, learner(FOREVER), each_turn=ask, resume=True)
    assert run() == STOPPED
    assert re.fullmatch(r"stopped by .* on .* \(pid \d+\)", run.supervisor.reason)
    assert next(turns) > 20


def test_one_policy_is_stopped_and_the_others_go_on(tmp_path: Path) -> None:
    """Its learner gets SIGTERM and time, then its end is told."""
    said = tmp_path / "saved"
    save = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(said)!r}, 'w').close(), sys.exit(143)))\n{FOREVER}"
    )
    ended = str(tmp_path / "r" / "requests" / "ended-b.json")
    wait = f"import os, time\nwhile not os.path.exists({ended!r}): time.sleep(0.01)"
    worker_b = replace(python("worker/b/0", FOREVER), policy="b")
    turns = iter(range(10_000))

    def ask() -> list[TelemetryRecord]:
        if next(turns) == 40:
            file_stop_request(tmp_path / "r", "b")
        return []

    run = Run(tmp_path, learner(wait), python("learner/b", save, restart="until_done"), worker_b, each_turn=ask)
    assert run() == 0
    assert said.exists()
    assert any(note.startswith("b is stopped by ") for note in run.board.notes)


def test_a_role_on_a_full_disk_ends_the_run_with_its_line(tmp_path: Path) -> None:
    """Also when its account of the crash cannot be written, and when the log had no room for the line."""
    code = "import sys; sys.stderr.write('exchange: No space left on device: log\\n'); sys.exit(2)"
    run = Run(tmp_path / "a", learner(FOREVER), python("exchange", code))
    run.folder.crash.rmdir()
    run.folder.crash.touch()
    assert run() == 2
    assert run.supervisor.reason == "exchange: exchange: No space left on device: log"
    assert "[exchange] | exchange: No space left on device: log" in run.output.getvalue()

    silent = Run(tmp_path / "b", learner(FOREVER), python("exchange", "import sys; sys.exit(2)"))
    assert silent() == 2
    assert silent.supervisor.reason == "exchange: no output"


def test_a_full_disk_under_the_supervisor_ends_the_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails in every turn, signals are sent and processes reaped: the last resort is not needed."""
    monkeypatch.setattr(host_processes, "LAST_RESORT_S", 3600.0)
    turns = iter(range(10**9))

    def fail() -> list[TelemetryRecord]:
        if next(turns) < 3:  # the processes are started in the first one
            return []
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    run = Run(tmp_path, learner(FOREVER), python("worker/a/0", FOREVER), each_turn=fail)
    assert run() == 2
    assert (
        run.supervisor.reason
        == "No space left on device: metrics.jsonl; free disk space there, then continue with --resume"
    )


def test_a_metrics_file_that_cannot_be_written_or_closed_ends_the_run(tmp_path: Path) -> None:
    """A device that takes no bytes and no fsync stands for it; there is a reason and no traceback."""
    create_run_folder(config_in(tmp_path))
    (tmp_path / "r" / "metrics.jsonl").symlink_to("/dev/full")
    run = Run(tmp_path, learner(FOREVER), resume=True)
    assert run() == 2
    assert str(tmp_path) in run.supervisor.reason


def test_a_log_on_a_full_disk_tells_why_by_itself(tmp_path: Path) -> None:
    """Without a free byte the log cannot hold a reason: the disk is one, and no restart will help."""
    child = Child(learner("import sys; sys.exit(1)"), tmp_path / "learner-a.log")
    child.log.touch()
    assert child.account(1, free_bytes=0) == (2, f"No space left on device: {child.log} (no output)")
    assert child.account(1, free_bytes=1) == (1, "no output")
    assert child.account(-9, free_bytes=0) == (-9, "no output")


def test_every_life_of_a_process_has_a_word_of_its_own(tmp_path: Path) -> None:
    """What is used once per life, such as a rendezvous, is named by attempt and life."""
    mark = tmp_path / "lives"
    note = f"import sys\nopen({str(mark)!r}, 'a').write(sys.argv[1] + ' ')\nsys.exit(1)"
    spec = python("worker/a/0", note)
    run = Run(tmp_path / "runs", learner(FOREVER), replace(spec, argv=(*spec.argv, "{life}")), max_restarts=1)
    assert run() == 1
    assert mark.read_text() == "attempt_1-1 attempt_1-2 "


@pytest.mark.parametrize(("sender", "num_sent"), [(Grant("learner", "a"), 1), (Grant("supervisor"), 0)])
def test_heartbeats_go_back_to_roles(tmp_path: Path, sender: Grant, num_sent: int) -> None:
    """So a role knows what has arrived; the supervisor of another host sends them back itself."""
    heartbeat = beat("learner/a", time.monotonic())
    run = Run(tmp_path, learner("pass"), told=[heartbeat], sender=sender)
    assert run() == 0
    assert run.inbox.sent == [encode(heartbeat)] * num_sent


STOPS_ITS_SUPERVISOR = """
import os, signal, time
from contextlib import ExitStack
from pathlib import Path
from mrl.config.run_folder import RunFolder
from mrl.processes.role_runtime import connect_telemetry
folder = RunFolder(Path({folder!r}))
with ExitStack() as closing:
    telemetry = connect_telemetry(folder, "learner/a", "a", closing)
    telemetry.metrics(1, {{"reward/mean": 0.5}})
    while '"step":1,' not in folder.metrics_jsonl.read_text():
        time.sleep(0.01)
    os.kill({pid}, signal.SIGSTOP)
    telemetry.metrics(2, {{"reward/mean": 0.5}})
    telemetry.metrics(3, {{"reward/mean": 0.5}})
"""
STANDS_STILL = """
import io, os, sys
from contextlib import closing
from pathlib import Path
from rich.console import Console
sys.path.insert(0, {tests!r})
from test_supervisor import STOPS_ITS_SUPERVISOR, StillBoard, config_in, create_run_folder, learner
from mrl.processes.display import Display, RunConsole
from mrl.processes.planning.plan import Plan
from mrl.processes.supervisor import Supervisor, open_inbox
config = config_in(Path({folder!r}))
folder = create_run_folder(config)
plan = Plan((learner(STOPS_ITS_SUPERVISOR.format(folder=str(folder.path), pid=os.getpid())),))
with closing(open_inbox(folder, "", plan.processes)) as inbox:
    display = Display(StillBoard(), RunConsole(file=io.StringIO()))
    sys.exit(Supervisor(config, folder, plan, inbox=inbox, display=display).run())
"""


def test_the_last_metrics_of_a_role_outlive_a_supervisor_that_stands_still(tmp_path: Path) -> None:
    """It goes on when the role is gone, and has every row once: of the link, of the file that was left, or of both."""
    code = STANDS_STILL.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    root, site = str(Path(__file__).parents[2]), str(Path(pytest.__file__).parents[1])
    paths = {"PYTHONPATH": f"{root}{os.pathsep}{site}"}
    supervisor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **paths})
    left = tmp_path / "r" / "unheard"
    try:
        wait_for(lambda: next(left.glob("*.msgpack"), None))
    finally:
        supervisor.send_signal(signal.SIGCONT)
        if not left.exists():
            supervisor.kill()
    assert supervisor.wait(timeout=120.0) == 0
    rows = list(each_metrics(tmp_path / "r" / "metrics.jsonl"))
    assert [row["step"] for row in rows if row["role"] == "learner/a" and "values" in row] == [1, 2, 3]
    assert not any(left.iterdir())


SUPERVISED = """
import io, sys
from pathlib import Path
from typing import TypeVar
sys.path.insert(0, {tests!r})
from test_supervisor import FOREVER, Run, learner, python
Run(Path({folder!r}), learner(FOREVER), python("worker/a/0", FOREVER))()
"""


def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """The kernel ends every child of a supervisor that had no chance to."""
    code = SUPERVISED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    root = str(Path(__file__).parents[2])
    supervisor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root})
    children = wait_for(lambda: same_twice(psutil.Process(supervisor.pid)))
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: all(not is_running(child) for child in children) or None)


def same_twice(process: psutil.Process) -> list[psutil.Process] | None:
    children = process.children(recursive=True)
    return children if len(children) == 2 and all("sleep(60)" in " ".join(c.cmdline()[:4]) for c in children) else None


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for(look: Callable[[], T | None]) -> T:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = look()
            if found is not None:
                return found
        time.sleep(0.02)
    raise AssertionError("waited 120 s in vain")


def beat(role: str, monotonic_s: float, time_unix_s: float = 0.0) -> HeartbeatRecord:
    """A role's clock that tells of dates says whatever it likes."""
    return HeartbeatRecord(
        role=role,
        policy="a",
        pid=1,
        time_unix_s=time_unix_s,
        doing="",
        awaiting="",
        whom="",
        for_s=0.0,
        bound_s=0.0,
        monotonic_s=monotonic_s,
    )


def test_a_terminal_is_left_with_the_picture_of_the_end() -> None:
    """Not with one in which roles still wait."""
    output = io.StringIO()
    with Display(StillBoard(), RunConsole(file=output, force_terminal=True, width=80)) as display:
        display.refresh(1.0)
    assert output.getvalue().rindex("what stays") > output.getvalue().rindex("board")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_goes_on_without_what_it_is_shown_on(tmp_path: Path, is_terminal: bool) -> None:
    """A pipe whose reader has left, and a terminal that was closed."""
    left, shown = pty.openpty() if is_terminal else os.pipe()
    os.close(left)
    run = Run(tmp_path, learner("import time; time.sleep(0.3)"))
    with os.fdopen(shown, "w") as file:
        console = RunConsole(file=file, width=80)
        run.supervisor._display = Display(run.board, console)
        run.board.due = ["a and b do not meet"]
        assert run() == 0
        console.print("the end")
        print("the end", file=file, flush=True)  # goes nowhere


def test_a_disk_that_is_full_where_the_output_goes_is_told() -> None:
    """As everywhere: a person has to free some."""
    with Path("/dev/full").open("w") as file:
        display = Display(StillBoard(), RunConsole(file=file, width=80))
        with pytest.raises(OSError, match="No space"):
            display.line("step 1")
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # where what is buffered goes


def test_a_tracker_gets_what_metrics_jsonl_gets_and_its_failure_ends_nothing(tmp_path: Path) -> None:
    """One that cannot start, in a folder that is a file: told in one line, counted in the last row of the metrics."""
    (tmp_path / "file").write_text("")
    run = Run(tmp_path, learner("pass"), told=[METRICS])
    table = TrackerTable(kind="tensorboard", folder=str(tmp_path / "file"))
    config = config_in(tmp_path).model_copy(update={"trackers": [table]})
    run.supervisor._trackers = Trackers(config, run.folder, run.supervisor.attempt)

    assert run() == 0
    last = list(each_metrics(run.folder.metrics_jsonl))[-1]["values"]
    rows = [line for line in each_metrics(run.folder.metrics_jsonl) if "values" in line][:-1]
    assert last["tracker/points/tensorboard"] == 0
    assert last["tracker/lost_points/tensorboard"] == sum(len(line["values"]) for line in rows)
    assert "tracker tensorboard: points are lost: " in run.output.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_records_show_to_be_amiss_is_an_event_once(is_terminal: bool) -> None:
    """Noted for the live view, and a line of its own behind the step's where there is none."""
    output, board = io.StringIO(), StillBoard()
    display = Display(board, RunConsole(file=output, force_terminal=is_terminal, width=80))
    board.due = ["a and b do not meet"]
    for step in (1, 2):
        record = MetricsRecord(role="learner/a", policy="a", step=step, time_unix_s=0.0, values={})
        display.record(record, float(step))
    assert board.notes == ["a and b do not meet"]
    lines = [] if is_terminal else ["step 1", "a and b do not meet", "step 2"]
    assert output.getvalue().splitlines() == lines
