"""A server's process and its descendants: all of them end, whatever they do about it."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mrl.engines.server_process import ServerProcess

WITHIN_S = 120.0
DEAF = "trap '' TERM; echo $$ >> {pids}; exec sleep 60"
"""A process that does not hear SIGTERM."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """Start a shell script as a server; nothing of it is left behind."""
    made: list[ServerProcess] = []

    def start(script: str) -> ServerProcess:
        made.append(ServerProcess(["sh", "-c", script], {}, tmp_path / "log"))
        return made[-1]

    yield start
    for server in made:
        server.end(0.0)
    for process in living(tmp_path / "pids"):
        process.kill()


def living(pids: Path) -> list[psutil.Process]:
    """The processes whose ids stand in a file, without those that have ended and that nobody has waited for."""
    found = []
    for pid in map(int, pids.read_text().split() if pids.exists() else []):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait, for a time that is only reached when something is wrong."""
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_the_tail_of_a_log_is_what_tells(start, tmp_path):
    """Of a traceback and what servers draw beside it, the lines that say something; of this life alone."""
    (tmp_path / "log").write_text("an earlier life\n")
    drawn = """Traceback (most recent call last):
  File "/env/loader.py", line 7, in load
    self.weights[name]
    ~~~~~~~~~~~~^^^^^^
KeyError: 'x'

Loading shards:  50%|#####     | 1/2
Loading shards: 100% Completed | 1/1 [00:00<00:00, 415.65it/s]
"""
    (tmp_path / "drawn").write_text(drawn)
    server = start(f"cat {tmp_path}/drawn; echo the end")
    until(lambda: "the end" in server.text())

    assert server.tail() == "Traceback (most recent call last): | self.weights[name] | KeyError: 'x' | the end"


def test_a_child_of_a_child_that_does_not_hear_is_ended_with_the_server(start, tmp_path):
    """The server goes at once; what it had started, two generations on and in a session of its own, is killed."""
    pids = tmp_path / "pids"
    (tmp_path / "grandchild.sh").write_text(DEAF.format(pids=pids))
    (tmp_path / "child.sh").write_text(f"sh {tmp_path}/grandchild.sh & wait")
    server = start(f"setsid sh {tmp_path}/child.sh & wait")
    until(lambda: bool(living(pids)))

    server.end(0.1)

    assert server.exit_code() is not None
    assert not living(pids)


def test_what_a_dead_server_left_is_ended(start, tmp_path):
    """Its children belong to nobody then: they were remembered while it lived."""
    pids = tmp_path / "pids"
    (tmp_path / "child.sh").write_text(DEAF.format(pids=pids))
    server = start(f"sh {tmp_path}/child.sh & wait")
    until(lambda: bool(living(pids)))
    assert server.exit_code() is None
    psutil.Process(server.pid).kill()
    until(lambda: server.exit_code() is not None)
    assert living(pids)

    server.end(0.1)

    assert not living(pids)


def test_a_server_that_hears_has_time_to_end_by_itself(start, tmp_path):
    """SIGTERM first: what it does then is done."""
    said = tmp_path / "said"
    server = start(f"trap 'echo bye > {said}; exit 0' TERM; echo $$ > {tmp_path}/pids; while :; do sleep 0.01; done")
    until(lambda: bool(living(tmp_path / "pids")))

    server.end()

    assert said.read_text() == "bye\n"
    assert server.exit_code() == 0


def test_packages_of_another_python_do_not_reach_it(start, tmp_path, monkeypatch):
    """A module system's, say; what is said of its own interpreter alone does."""
    monkeypatch.setenv("PYTHONPATH", "/apps/python3.9/site-packages")
    monkeypatch.setenv("PYTHONHOME", "/apps/python3.9")
    server = start(f'echo "<$PYTHONPATH$PYTHONHOME>" > {tmp_path}/said')
    until(lambda: server.exit_code() is not None)
    assert (tmp_path / "said").read_text() == "<>\n"


def test_its_temporary_folder_goes_with_it(start, tmp_path):
    """Servers leave sockets and files of metrics there."""
    server = start(f'echo x > "$TMPDIR/left"; echo "$TMPDIR" > {tmp_path}/folder')
    until(lambda: server.exit_code() is not None)
    folder = Path((tmp_path / "folder").read_text().strip())
    assert (folder / "left").exists()

    server.end()

    assert not folder.exists()


SHARING = """
import os, signal, sys
from multiprocessing import get_context, shared_memory

def rank(told):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shared = shared_memory.SharedMemory(create=True, size=4096)
    told.send(shared.name)
    signal.pause()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ours, its = get_context("spawn").Pipe()
    one = get_context("spawn").Process(target=rank, args=(its,))
    one.start()
    with open(sys.argv[1], "w") as file:
        file.write(ours.recv())
    signal.pause()
"""
"""Ranks of vLLM talk to each other through such memory."""


def test_shared_memory_of_a_server_that_does_not_hear_goes_with_it(start, tmp_path):
    """Or /dev/shm would be fuller with every server that hung, until none starts any more."""
    script, said = tmp_path / "sharing.py", tmp_path / "name"
    script.write_text(SHARING)
    server = start(f"exec {sys.executable} {script} {said}")
    until(lambda: said.exists() and bool(said.read_text()))
    shared = Path("/dev/shm") / said.read_text()
    assert shared.exists()
    assert server.exit_code() is None

    server.end(1.0)

    left = shared.exists()
    shared.unlink(missing_ok=True)
    assert not left
