"""A process of which roles are forks: what they share with it, what they do not, and how each of them may end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.fork_server import ForkedProcess, ForkServer
from mrl.parent_death import CORES

PLANTED = """
import json, os, signal, sys, time
import mrl.cli.main

def main(words):
    print(json.dumps({
        "words": words, "argv": sys.argv[1:], "pid": os.getpid(), "leads": os.getsid(0) == os.getpid(), "planted": pid,
        "environment": {name: os.environ.get(name) for name in ("A", "B", "C")}, "said": sys.stdin.read(),
        "cores": sorted(os.sched_getaffinity(0)), "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    }))
    match words:
        case ["save"]:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            sys.stdout.flush()
            time.sleep(600)
        case ["say why"]:
            sys.exit("as told")
        case ["raise"]:
            raise RuntimeError("as told")
        case ["wait"]:
            sys.stdout.flush()
            time.sleep(600)
    return int(words[0])

pid = os.getpid()
mrl.cli.main.main = main
"""
"""What the server imports: it stands in for the commands of mrl, and knows in which process it was imported."""


class Forks:
    """A server that has imported the module above."""

    def __init__(self, folder: Path, code: str = PLANTED) -> None:
        (folder / "planted.py").write_text(code)
        self.log = folder / "log"
        self.environment = {"PYTHONPATH": str(folder), "A": "1", "B": "1"}
        self.server = ForkServer(["planted"], self.environment)

    def settle(self) -> bool:
        """Wait until it is ready or gone."""
        while not self.server.is_settled(120.0):
            time.sleep(0.01)
        return self.server.is_ready

    def fork(self, *words: str, **environment: str) -> ForkedProcess | None:
        """A fork whose log is `log`, and whose input is "hello"."""
        reading, writing = os.pipe()
        os.write(writing, b"hello")
        os.close(writing)
        with self.log.open("ab") as log:
            process = self.server.fork(words, self.environment | environment, reading, log.fileno())
        os.close(reading)
        return process

    def run(self, *words: str, **environment: str) -> int:
        """The exit code of one that ends by itself."""
        process = self.fork(*words, **environment)
        assert process is not None
        return ended(process)

    def told(self) -> dict[str, object]:
        """What the last one printed of itself."""
        return dict(json.loads([line for line in self.log.read_text().splitlines() if line.startswith("{")][-1]))


def ended(process: ForkedProcess) -> int:
    """Its code, once it has one."""
    while not process.has_ended():
        time.sleep(0.01)
    return process.wait()


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path)
    assert made.settle()
    yield made
    made.server.close()


def test_a_fork_is_as_a_process_that_was_started_anew(forks: Forks) -> None:
    """But for what was imported: a session, descriptors, environment and cores of its own."""
    core = min(os.sched_getaffinity(0))
    environment = {"B": "2", "C": "3", CORES: str(core)}
    del forks.environment["A"]
    assert forks.run("0", **environment) == 0
    told = forks.told()
    assert told["words"] == told["argv"] == ["0"]
    assert told["planted"] not in (told["pid"], os.getpid())
    assert told["leads"]
    assert told["environment"] == {"A": None, "B": "2", "C": "3"}
    assert told["said"] == "hello"
    assert told["cores"] == [core]
    assert told["descriptors"] == [0, 1, 2]


def test_one_fork_leaves_nothing_to_the_next(forks: Forks) -> None:
    """The server forks, and changes in nothing."""
    assert forks.run("0", C="3") == 0
    assert forks.run("0") == 0
    assert forks.told()["environment"] == {"A": "1", "B": "1", "C": None}


@pytest.mark.parametrize("code", [0, 2, 77])
def test_the_exit_code_is_what_the_command_returns(forks: Forks, code: int) -> None:
    """As the interpreter has it."""
    assert forks.run(str(code)) == code


def test_what_a_command_raises_stands_in_its_log(forks: Forks) -> None:
    """And its code is the interpreter's."""
    assert forks.run("raise") == 1
    assert "\nRuntimeError: as told\n" in forks.log.read_text()


def test_what_a_command_exits_with_stands_there_too(forks: Forks) -> None:
    """As the interpreter has it."""
    assert forks.run("say why") == 1
    assert forks.log.read_text().startswith("as told\n")


def test_what_is_sent_to_every_process_of_a_job_leaves_a_role_its_time(forks: Forks) -> None:
    """The server goes on, or its death would end the role before it has saved anything."""
    process = forks.fork("save")
    assert process is not None
    while not forks.log.exists() or "save" not in forks.log.read_text():
        time.sleep(0.01)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        server_of(process).send_signal(number)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 5
    assert forks.run("0") == 0


def test_a_fork_that_cannot_be_made_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit of processes or descriptors; the next one may be made."""
    fails = "\nforks, real = iter(range(9)), os.fork\n"
    fails += (
        "def fork():\n    if next(forks) == 1:\n        raise BlockingIOError(11, 'as planned')\n    return real()\n"
    )
    forks = Forks(tmp_path, PLANTED + fails + "os.fork = fork\n")
    assert forks.settle()
    first = forks.fork("wait")
    assert first is not None
    assert forks.fork("0") is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", fail)
        assert forks.fork("wait") is None
    assert forks.run("7") == 7
    assert not first.has_ended()
    assert len(server_of(first).children()) == 1
    forks.server.close()


def fail(pid: int) -> int:
    raise OSError(24, "no descriptor")


def test_an_environment_that_is_too_large_for_the_line_costs_no_fork(forks: Forks) -> None:
    """The role starts by itself, and the line is as it was."""
    assert forks.fork("0", A="x" * 200_000) is None
    assert forks.run("7") == 7


def test_forks_draw_for_themselves(tmp_path: Path) -> None:
    """Also from numpy's global generator, which plug-ins may use."""
    draw = "\nimport numpy.random, random\ndef main(words):\n"
    draw += "    print(random.random(), numpy.random.random())\n    return 0\n"
    forks = Forks(tmp_path, PLANTED + draw + "mrl.cli.main.main = main\n")
    assert forks.settle()
    assert forks.run("0") == forks.run("0") == 0
    drawn = [line.split() for line in forks.log.read_text().splitlines()]
    assert all(a != b for a, b in zip(*drawn, strict=True))
    forks.server.close()


def test_a_server_that_hangs_is_ended(forks: Forks) -> None:
    """What it would say later might be taken for the answer to something else."""
    process = forks.fork("wait")
    assert process is not None
    server_of(process).suspend()
    forks.server._end.settimeout(0.1)
    assert forks.fork("0") is None
    assert not forks.server.is_ready
    assert ended(process) == -signal.SIGKILL


def test_a_fork_that_was_killed_keeps_its_pid_until_it_is_waited_for(forks: Forks) -> None:
    """So that a signal to its group hits nobody else."""
    process = forks.fork("wait")
    assert process is not None
    assert not process.has_ended()
    process.send_signal(signal.SIGKILL)
    while not process.has_ended():
        time.sleep(0.01)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert process.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)
    assert forks.run("3") == 3


def server_of(process: ForkedProcess) -> psutil.Process:
    parent = psutil.Process(process.pid).parent()
    assert parent is not None
    return parent


def test_forks_die_with_their_server(forks: Forks) -> None:
    """They count as killed, and nothing is a fork any more."""
    process = forks.fork("wait")
    assert process is not None
    server_of(process).kill()
    assert ended(process) == -signal.SIGKILL
    assert forks.server.is_settled(120.0)
    assert not forks.server.is_ready
    assert forks.fork("0") is None


def test_a_server_that_dies_unseen_makes_no_fork(forks: Forks) -> None:
    """It is found out when it is asked."""
    process = forks.fork("wait")
    assert process is not None
    server_of(process).kill()
    ended(process)
    assert forks.fork("0") is None
    assert not forks.server.is_ready


def test_server_and_forks_die_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that ends."""
    (tmp_path / "planted.py").write_text(PLANTED)
    code = f"""
import os, sys, time
sys.path.insert(0, {str(tmp_path)!r})
from mrl.fork_server import ForkServer
server = ForkServer(["planted"], {{**os.environ, "PYTHONPATH": {str(tmp_path)!r}}})
while not server.is_settled(120.0):
    time.sleep(0.01)
nothing = open(os.devnull)
process = server.fork(["wait"], os.environ, nothing.fileno(), 2)
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        fork = psutil.Process(int(owner.stdout.readline()))
        server = fork.parent()
        owner.kill()
    assert server is not None
    gone, alive = psutil.wait_procs([fork, server], timeout=120)
    assert (len(gone), alive) == (2, [])


def test_a_server_that_is_ended_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes where a command writes why it ends; so it must not find its line closed before."""
    process = (server := Forks(tmp_path).server)._process
    kill = process.kill

    def kill_late() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        kill()

    process.kill = kill_late  # type: ignore[method-assign]
    server.close()
    assert capfd.readouterr() == ("", "")


def test_an_import_that_fails_is_the_end_of_it(tmp_path: Path) -> None:
    """It is told where the command's errors are."""
    forks = Forks(tmp_path, "raise ImportError('as planned')")
    assert not forks.settle()
    assert forks.fork("0") is None
    forks.server.close()


def test_an_import_that_hangs_is_given_up(tmp_path: Path) -> None:
    """After the time that a process has to start."""
    forks = Forks(tmp_path, "import time\ntime.sleep(600)")
    assert not forks.server.is_settled(3600.0)
    assert forks.server.is_settled(0.0)
    assert not forks.server.is_ready
