"""The node of a host's units with real processes: started bound to cores, ended, killed with all that they started."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
from mrl.processes import unit_memory, unit_node
from mrl.processes.host_processes import HostProcesses
from mrl.processes.planning import restarts
from mrl.processes.planning.lifecycle import Lifecycle
from mrl.processes.planning.plan import ProcessSpec, unit_worker
from mrl.processes.unit_memory import gpu_models, read_used_mib, used_gpu_mib
from mrl.records.codec import decode, decoder, encode
from mrl.records.unit_messages import NodeOrders, NodeReport, UnitOrder, UnitReport
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.keys import create_keys, load_keys
from mrl.transport.requests import SILENCE_S
from mrl.transport.server import ServerSocket

CORE = min(os.sched_getaffinity(0))
UNIT, GPU_UNIT = f"cpu:{CORE}", "gpu:0"
reports = decoder(NodeReport)
FOREVER = "import time\nwhile True: time.sleep(60)"
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
open(sys.argv[1], "w").write("x")
time.sleep(600)
"""

SLEEPER = """
import os, socket, sys, time
folder = sys.argv[1]
def said(name):
    return open(os.path.join(folder, name)).read()
def holds(mib):
    with open(os.path.join(folder, "new"), "w") as file:
        file.write(mib)
    os.replace(file.name, os.path.join(folder, "used_mib"))
line = socket.socket(fileno=0)
line.setblocking(True)
holds("40000")
while True:
    word, _, epoch = line.recv(64).decode().partition(" ")
    if word == "sleep":
        holds(said("asleep_mib"))
        line.send(b"asleep")
    if word == "wake":
        time.sleep(float(said("hold_s")))
        holds("40000")
        line.send(b"awake " + epoch.encode())
"""
"""An engine that says how much of the GPU it holds, where the driver of these tests looks."""
SLEEPLESS = (
    "import socket; line = socket.socket(fileno=0); line.setblocking(True); line.recv(64); line.send(b'sleepless')"
)


class Told:
    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str, now_s: float) -> None:
        self.events.append(text)

    def line(self, text: str) -> None: ...


class Node:
    """A node whose allocator is this test."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        closing: ExitStack,
        *,
        max_restarts: int = 5,
        unit: str = UNIT,
        in_turns: bool = False,
    ) -> None:
        self.folder, self.code, self.unit = folder, FOREVER, unit
        is_gpu = unit == GPU_UNIT
        self.holds(100)
        self.says(hold_s="0", asleep_mib="600")
        if is_gpu:
            self.driver = folder / "bin" / "nvidia-smi"
            self.driver.parent.mkdir()
            self.driver.write_text(f"#!/bin/sh\n[ $2 = --query-gpu=memory.used ] && cat {folder}/used_mib\n")
            self.driver.chmod(0o755)
            monkeypatch.setenv("PATH", f"{self.driver.parent}:{os.environ['PATH']}")
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        tables = {
            "run": {"name": "r", "steps": 3, "folder": str(folder / "runs"), "min_free_mib": 0},
            "tasks": {"copy": {"source": "words", "dataset": "copy"}},
            "policies": {
                name: {"model": "m", "device": "cuda" if is_gpu else "cpu", "turns": in_turns} for name in "ab"
            },
            "allocation": {"units": [unit], "residency": "sleep" if is_gpu and not in_turns else "stop", "wake_s": 3.0},
            "supervision": {"backoff_s": 1.5, "max_restarts": max_restarts},
        }
        config = validate(tables, where="test")
        self.run = run = create_run_folder(config)
        self.server = ServerSocket(create_keys(run.keys))
        closing.callback(self.server.close)
        publish_endpoint(run.endpoints, "allocator", self.server.address, self.server.ipc_path)
        monkeypatch.setattr(unit_node, "unit_worker", self._worker)
        self.lifecycle, self.told = Lifecycle(frozenset({"learner/a", "learner/b"}), stop_s=1.0), Told()
        self.processes = HostProcesses(
            [], table=config.supervision, is_sync=False, lifecycle=self.lifecycle, attempt=folder,
            crash=folder / "crash", told=self.told,
        )  # fmt: skip
        closing.callback(self.processes.kill_all)
        unit_node.lease_units(config, run, self.processes, self.lifecycle, host="", is_first=True, closing=closing)
        self.orders: list[UnitOrder] = []
        self.report: NodeReport | None = None

    def says(self, **values: str) -> None:
        """What the engine of the next start reads."""
        for name, value in values.items():
            (self.folder / name).write_text(value)

    def holds(self, mib: int) -> None:
        """What the driver tells of the GPU's memory."""
        (self.folder / "used_mib").write_text(str(mib))

    def until(self, condition: Callable[[UnitReport], object], timeout_s: float = 120.0) -> UnitReport:
        """Turn, and answer every report with the orders, until a report says so."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for part in self.processes.parts():
                part(time.monotonic())
            for client, body, grant in self.server.receive(0.01):
                assert grant.role == "supervisor"
                self.report = decode(body, reports)
                self.server.send(client, encode(NodeOrders(life=1, orders=self.orders)))
                if condition(self.report.units[0]):
                    return self.report.units[0]
        raise AssertionError(f"did not happen; last report {self.report}")

    def order(self, kind: str, epoch: int, policy: str = "", grace_s: float = 0.3) -> None:
        self.orders = [UnitOrder(unit=self.unit, epoch=epoch, kind=kind, policy=policy, grace_s=grace_s)]  # type: ignore[arg-type]

    def start(self, epoch: int, policy: str = "a") -> int:
        """Start an engine and wait for its process."""
        self.order("start", epoch, policy)
        self.until(lambda unit: unit.resident_epoch == epoch and self.on_unit())
        return self.on_unit()[0]

    def on_unit(self) -> list[int]:
        """Processes on the unit that have become what they are to be."""
        ours = unit_node.processes_on(self.unit, self.folder / "runs" / "r").values()
        return [pid for pids in ours for pid in pids if self._has_become_what_it_is(pid)]

    @staticmethod
    def _has_become_what_it_is(pid: int) -> bool:
        try:
            return "parent_death.py" not in " ".join(psutil.Process(pid).cmdline())
        except psutil.NoSuchProcess:
            return False

    def _worker(self, *args: object, **named: object) -> ProcessSpec:
        spec = unit_worker(*args, **named)  # type: ignore[arg-type]
        mark = self.folder if self.code == SLEEPER else self.folder / "mark"
        argv = (sys.executable, "-S", "-c", self.code, str(mark))
        return ProcessSpec(**{name: getattr(spec, name) for name in spec.__slots__} | {"argv": argv})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    before = set(psutil.Process().children(recursive=True))
    with ExitStack() as closing:
        yield Node(tmp_path, monkeypatch, closing)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def gpu_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node with a GPU, whose driver is a script and tells what a file says."""
    with ExitStack() as closing:
        yield Node(tmp_path, monkeypatch, closing, unit=GPU_UNIT)


def test_an_engine_starts_on_its_cores_and_ends_when_asked(node: Node) -> None:
    """That it was asked is no failure: nothing is told and nothing counted."""
    pid = node.start(5)
    assert os.sched_getaffinity(pid) == {CORE}
    assert psutil.Process(pid).environ()["MRL_UNIT_EPOCH"] == "5"
    node.order("end", 5)
    gone = node.until(lambda unit: unit.resident_epoch == 0)
    assert (gone.epoch, gone.cleared_epoch) == (5, 0)
    node.order("clear", 5)
    node.until(lambda unit: unit.cleared_epoch == 5)
    assert (node.told.events, node.processes.num_restarts) == ([], 0)


def test_what_hears_no_sigterm_is_killed_with_all_that_it_started_before_the_next_starts(node: Node) -> None:
    """Also a child in a session of its own."""
    node.code = STUBBORN
    first = node.start(5)
    node.until(lambda _: (node.folder / "mark").exists() and len(node.on_unit()) == 2)
    both = node.on_unit()
    node.code = FOREVER
    node.order("start", 6, "b")
    node.until(lambda unit: unit.resident_policy == "b" and node.on_unit() and first not in node.on_unit())
    assert not [pid for pid in both if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_left_over_of_a_dead_engine_is_no_empty_unit(node: Node) -> None:
    """Its parent is gone; it is killed when the unit is to be cleared, and not before."""
    node.code = STUBBORN
    first = node.start(5)
    node.until(lambda _: (node.folder / "mark").exists() and len(node.on_unit()) == 2)
    [other] = set(node.on_unit()) - {first}
    os.kill(first, signal.SIGKILL)
    node.until(lambda _: first not in node.on_unit())
    assert node.on_unit() == [other]
    assert node.report is not None
    assert node.report.units[0].resident_epoch == 5
    node.order("clear", 5)
    node.until(lambda unit: unit.cleared_epoch == 5)
    assert node.on_unit() == []


def test_an_engine_that_fails_is_told_and_waits_before_its_next_start(node: Node) -> None:
    """The back-off holds over leases; the node says meanwhile that somebody is there."""
    node.code = "raise SystemExit('ValueError: no such model')"
    node.order("start", 5, "a")
    node.until(lambda unit: unit.epoch == 5 and unit.resident_epoch == 0)
    failed_s = time.monotonic()
    assert "ValueError: no such model" in node.told.events[0]
    node.code = FOREVER
    node.order("start", 6, "a")
    node.until(lambda _: node.on_unit())
    assert time.monotonic() - failed_s > 1.2


def test_an_engine_that_is_given_up_takes_its_unit_out_of_service_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the pause: the node says so, a person is told, and then another start is no failure any more."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 1.0)
    with ExitStack() as closing:
        node = Node(tmp_path, monkeypatch, closing, max_restarts=0)
        node.code = "raise SystemExit('CUDA error: uncorrectable ECC error')"
        node.order("start", 5, "b")
        failed = node.until(lambda unit: unit.failed_policy)
        assert (failed.failed_policy, failed.resident_epoch) == ("b", 0)
        [told] = node.told.events
        assert told.startswith("worker/b/0 exited with code 1, after 0 restarts within 60 s (CUDA error")
        assert told.endswith(f"; unit {UNIT} is out of service for 1 s")
        assert node.lifecycle.phase == "running"
        node.code = FOREVER
        node.order("clear", 5)
        node.until(lambda unit: not unit.failed_policy)
        node.start(6, "b")
        assert (node.lifecycle.phase, len(node.told.events)) == ("running", 1)


def test_an_engine_that_has_given_itself_a_title_is_found(node: Node) -> None:
    """As every role does; a title lies where the environment was, unless it is told to keep off."""
    site = [path for path in sys.path if "site-packages" in path]
    node.code = f"import sys; sys.path += {site}; import setproctitle; setproctitle.setproctitle('mrl::x')\n{FOREVER}"
    pid = node.start(5)
    node.until(lambda _: psutil.Process(pid).cmdline()[0].strip() == "mrl::x")
    assert node.on_unit() == [pid]


def put_to_sleep(node: Node, epoch: int = 5) -> int:
    """a's engine sleeps, and the unit is cleared."""
    node.code = SLEEPER
    pid = node.start(epoch)
    node.until(lambda _: (node.folder / "used_mib").read_text() == "40000")
    node.order("sleep", epoch, grace_s=30.0)
    node.until(lambda unit: unit.resident_epoch == 0)
    node.order("clear", epoch)
    node.until(lambda unit: unit.cleared_epoch == epoch)
    return pid


def counts(node: Node) -> tuple[int, int, int, int]:
    assert node.report is not None
    return node.report.slept, node.report.woken, node.report.failed_sleeps, node.report.failed_wakes


def test_an_engine_that_sleeps_stays_beside_another_and_is_woken_in_its_turn(gpu_node: Node) -> None:
    """The same process, under the new epoch; each that sleeps may keep a little of the GPU."""
    node = gpu_node
    node.says(asleep_mib="1500")
    pid = put_to_sleep(node)
    node.order("start", 6, "b")
    node.until(lambda unit: unit.resident_policy == "b" and len(node.on_unit()) == 2)
    node.until(lambda _: (node.folder / "used_mib").read_text() == "40000")
    node.order("sleep", 6, grace_s=30.0)
    node.until(lambda unit: unit.resident_epoch == 0)
    node.order("start", 7, "a")
    node.until(lambda _: counts(node)[1] == 1)
    assert psutil.Process(pid).environ()["MRL_UNIT_POLICY"] == "a"
    assert len(node.on_unit()) == 2
    assert counts(node) == (2, 1, 0, 0)
    assert node.told.events == []


def test_a_sleeper_that_was_killed_is_started_anew(gpu_node: Node) -> None:
    node, pid = gpu_node, put_to_sleep(gpu_node)
    os.kill(pid, signal.SIGKILL)
    node.until(lambda _: pid not in node.on_unit())
    node.order("start", 6, "a")
    node.until(lambda unit: unit.resident_epoch == 6 and node.on_unit() and pid not in node.on_unit())
    assert counts(node)[1] == 0


def test_a_sleeper_that_does_not_wake_up_is_killed_and_counted(gpu_node: Node) -> None:
    """The unit is proved quiet, and can be granted again."""
    node, pid = gpu_node, put_to_sleep(gpu_node)
    node.says(hold_s="30")
    node.order("start", 6, "a")
    node.until(lambda unit: unit.resident_epoch == 6)
    node.until(lambda unit: unit.resident_epoch == 0)
    assert not psutil.pid_exists(pid)
    assert counts(node) == (1, 0, 0, 1)
    node.order("start", 7, "a")
    node.until(lambda unit: unit.resident_epoch == 7 and node.on_unit())


@pytest.mark.parametrize("code", [FOREVER, SLEEPLESS], ids=["deaf", "cannot"])
def test_what_does_not_fall_asleep_is_ended_and_counted(gpu_node: Node, code: str) -> None:
    """Whether it says nothing until its time is over, or that it cannot."""
    node = gpu_node
    node.code = code
    pid = node.start(5)
    node.order("sleep", 5, grace_s=0.3 if code == FOREVER else 30.0)
    node.until(lambda unit: unit.resident_epoch == 0)
    assert not psutil.pid_exists(pid)
    assert counts(node) == (0, 0, 1, 0)


def test_memory_of_a_learner_that_has_the_gpu_in_turns_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is quiet once no process of its engine is left."""
    with ExitStack() as closing:
        node = Node(tmp_path, monkeypatch, closing, unit=GPU_UNIT, in_turns=True)
        pid = node.start(5)
        node.holds(39000)
        node.order("end", 5)
        node.until(lambda unit: unit.resident_epoch == 0)
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("has_driver", [True, False], ids=["its memory is held", "no driver answers"])
def test_an_engine_that_sleeps_by_its_word_alone_is_killed_at_the_end_of_its_grace(
    gpu_node: Node, has_driver: bool
) -> None:
    """It may be awake. Once it is gone, and its memory with it, the unit is quiet."""
    node = gpu_node
    node.code = SLEEPER
    node.says(asleep_mib="39000")
    pid = node.start(5)
    if not has_driver:
        node.driver.unlink()
        node.says(asleep_mib="100")
    node.order("sleep", 5, grace_s=1.0)
    ordered_s = time.monotonic()
    node.until(lambda _: not psutil.pid_exists(pid))
    assert time.monotonic() - ordered_s >= 1.0
    assert node.report is not None
    assert not has_driver or node.report.units[0].resident_epoch == 5, "not quiet while its memory is held"
    node.holds(100)
    node.until(lambda unit: unit.resident_epoch == 0)
    assert counts(node) == (0, 0, 1, 0)


def test_a_sleeper_that_takes_memory_again_is_killed_before_another_engine_starts(
    gpu_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that the driver may take to show what others gave back."""
    monkeypatch.setattr(unit_memory, "RETURN_S", 1.0)
    node, pid = gpu_node, put_to_sleep(gpu_node)
    node.holds(9000)
    held_s = time.monotonic()
    node.order("start", 6, "b")
    node.until(lambda _: not psutil.pid_exists(pid))
    assert time.monotonic() - held_s > 1.0
    node.holds(100)
    node.until(lambda unit: unit.resident_policy == "b" and node.on_unit())


def test_a_sleeper_whose_policy_is_released_is_ended(gpu_node: Node) -> None:
    """Nobody would wake it any more."""
    pid = put_to_sleep(gpu_node)
    gpu_node.lifecycle.done.add("learner/a")
    gpu_node.until(lambda _: pid not in gpu_node.on_unit())


def test_policies_that_are_done_or_stopped_are_released(node: Node) -> None:
    node.until(lambda _: True)
    assert node.report is not None
    assert node.report.released == []
    node.lifecycle.done.add("learner/a")
    node.lifecycle.stopped.add("b")
    node.until(lambda _: node.report is not None and node.report.released == ["a", "b"])


def test_the_driver_is_asked_for_memory_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script stands in for nvidia-smi here; what it is asked, and odd answers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert used_gpu_mib(["0"]) is None
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\n[ "$1 $2" = "--id=0,2 --query-gpu=memory.used" ] && printf "15\\n1024\\n"\n')
    script.chmod(0o755)
    assert used_gpu_mib(["0", "2"]) == [15, 1024]
    assert used_gpu_mib(["7"]) is None
    assert used_gpu_mib([]) is None
    assert read_used_mib(["[N/A]"]) is None
    assert read_used_mib([]) is None


def test_the_driver_is_asked_what_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they were named; where an answer is missing, nobody's is used."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_models(["0"]) == []
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\n[ "$2" = "--query-gpu=name" ] && [ "$1" = "--id=2,0" ] && printf "A10\\nH100\\n"\n')
    script.chmod(0o755)
    assert gpu_models(["2", "0"]) == ["A10", "H100"]
    assert gpu_models(["0"]) == []
    script.write_text("#!/bin/sh\necho A10\n")
    assert gpu_models(["2", "0"]) == []


def test_a_node_reports_what_its_units_are(node: Node) -> None:
    node.until(lambda _: node.report is not None)
    assert node.report is not None
    assert [unit.unit_type for unit in node.report.units] == ["cpu"] * len(node.report.units)


def test_an_allocator_that_moved_is_found_and_its_silence_is_said(node: Node) -> None:
    """One that answers is never looked for."""
    with capture_logs() as logs:
        end_s = time.monotonic() + SILENCE_S + 0.5
        node.until(lambda _: time.monotonic() > end_s)
        assert [line for line in logs if line["event"] == "no answer"] == []
        node.server.close()
        node.server = ServerSocket(load_keys(node.run.keys))
        publish_endpoint(node.run.endpoints, "allocator", node.server.address, node.server.ipc_path)
        node.until(lambda _: any(line["event"] == "answers again" for line in logs))
        node.server.close()
    assert [line["whom"] for line in logs if line["event"] == "no answer"] == ["allocator"]
