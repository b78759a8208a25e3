"""What a learner's torchrun listens on: nothing that another machine can reach."""

import contextlib
import ipaddress
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mrl.config.run_folder import LOCAL_FOLDER
from mrl.processes.planning.plan import environment
from mrl.processes.planning.torchrun import LIFE, torchrun_argv, torchrun_environment

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
RANKS = 2
RANK = """
import sys
import time
from pathlib import Path

import torch

from mrl.learner.ranks.world import join_world

folder = Path(sys.argv[1])
world = join_world("cpu", timeout_s=120)
total = world.sum_values(torch.ones(1))
(folder / f"joined-{world.rank}").write_text(str(float(total)))
while not (folder / "end").exists():
    time.sleep(0.05)
world.close()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts the ranks as the launch plan does; what is left of them is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    rendezvous = tmp_path / "rendezvous"
    rendezvous.mkdir()
    (tmp_path / "rank.py").write_text(RANK)

    def launch(life: str) -> subprocess.Popen[bytes]:
        argv = torchrun_argv(rendezvous, policy="a", processes=RANKS)
        argv = (*(word.replace(LIFE, life) for word in argv), str(tmp_path / "rank.py"), str(tmp_path))
        variables = {**os.environ, **environment(1), **torchrun_environment(RANKS), "PYTHONPATH": str(ROOT)}
        variables |= {LOCAL_FOLDER: str(rendezvous)}
        started.append(subprocess.Popen(argv, env=variables))
        return started[-1]

    yield launch
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in (*psutil.Process(process.pid).children(recursive=True), process):
                member.kill()
        process.wait(120)


def test_no_process_of_a_learner_listens_beyond_loopback(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Neither the agent nor a rank, while the ranks are one group; a second life meets anew after SIGKILL."""
    first = start("attempt_1-1")
    await_ranks(tmp_path, first)
    assert [address for address in listening(first) if not ipaddress.ip_address(address).is_loopback] == []
    kill_tree(first)

    for rank in range(RANKS):
        (tmp_path / f"joined-{rank}").unlink()
    second = start("attempt_1-2")
    await_ranks(tmp_path, second)
    (tmp_path / "end").touch()
    assert second.wait(120) == 0


def listening(process: subprocess.Popen[bytes]) -> list[str]:
    """Addresses on which the process or one below it listens, datagram sockets included."""
    tree = psutil.Process(process.pid)
    found = [one for member in (tree, *tree.children(recursive=True)) for one in member.net_connections("inet")]
    return [one.laddr.ip for one in found if one.laddr and not one.raddr]


def await_ranks(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until every rank has spoken with the others."""
    deadline_s = time.monotonic() + 120
    while not all(_said(folder / f"joined-{rank}") == str(float(RANKS)) for rank in range(RANKS)):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL of the agent and its ranks."""
    for member in (*psutil.Process(process.pid).children(recursive=True), process):
        member.kill()
    process.wait(120)
