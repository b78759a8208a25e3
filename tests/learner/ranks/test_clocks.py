"""Clocks of hosts differ: one host here is a process whose clocks are an hour ahead."""

import os
import subprocess
import sys
import time
from pathlib import Path

from mrl.learner.ranks.host_board import HostBoard
from mrl.learner.ranks.own_address import GLOO, NCCL
from mrl.learner.ranks.rank_place import RankPlace
from mrl.learner.ranks.rendezvous import RendezvousPoint, meet
from mrl.transport.endpoints import ADDRESS

PATIENCE_S = 300.0
AHEAD = """
import sys, time

wall, since_boot = time.time, time.monotonic
time.time, time.monotonic = lambda: wall() + 3600, lambda: since_boot() + 3600

from pathlib import Path

from mrl.learner.ranks.host_board import HostBoard
from mrl.learner.ranks.rendezvous import RendezvousPoint, meet
from mrl.learner.ranks.rank_place import RankPlace

place = RankPlace(host=1, hosts=("a", "b"))
met = meet(place, RendezvousPoint(Path(sys.argv[1]), "ranks-qwen", 300.0, lost_s=60.0))
board = HostBoard(lambda: met.another("board"), place, lost_s=60.0)
board.note("backward")
while board.places()[0].what != "sum":
    time.sleep(0.05)
first = board.places()[0]
print(abs(time.monotonic() - first.since_s) < 300, repr(board.lost(time.monotonic())), flush=True)
sys.stdin.read()
"""


def test_an_hour_between_the_clocks_of_two_hosts_harms_nobody(tmp_path: Path, monkeypatch) -> None:
    """They meet, each hears what the other is at and for how long by its own clock, and neither takes it for lost."""
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    words = [sys.executable, "-c", AHEAD, str(tmp_path)]
    place = RankPlace(hosts=("a", "b"))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as ahead:
        assert ahead.stdin is not None
        assert ahead.stdout is not None
        met = meet(place, RendezvousPoint(tmp_path, "ranks-qwen", PATIENCE_S, lost_s=60.0))
        board = HostBoard(lambda: met.another("board"), place, lost_s=60.0)
        try:
            board.note("sum")
            deadline_s = time.monotonic() + PATIENCE_S
            while board.places()[1].what != "backward" and time.monotonic() < deadline_s:
                time.sleep(0.05)
            other = board.places()[1]
            said = next(line for line in ahead.stdout if line.startswith(("True", "False")))
            assert (other.what, board.lost(time.monotonic())) == ("backward", "")
            assert abs(time.monotonic() - other.since_s) < PATIENCE_S
            assert said == "True ''\n"
        finally:
            ahead.stdin.close()
            ahead.wait(PATIENCE_S)
            board.close()
