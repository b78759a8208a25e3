"""What ranks that share no memory know of each other."""

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from mrl.learner.ranks.host_board import OVER, HostBoard
from mrl.learner.ranks.rank_place import RankPlace
from mrl.learner.ranks.watchdog import stall_of

HOSTS = ("a", "b")
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.learner.ranks.host_board.BEAT_S", 0.01)
    monkeypatch.setattr("mrl.learner.ranks.host_board.LOOK_S", 0.01)


@pytest.fixture
def board() -> Iterator[Callable[[int, dist.Store], HostBoard]]:
    """Makes boards, one rank on each of two hosts, and closes them."""
    made: list[HostBoard] = []

    def make(host: int, store: dist.Store) -> HostBoard:
        made.append(HostBoard(lambda: store, RankPlace(host=host, hosts=HOSTS), lost_s=5.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


Boards = Callable[[int, dist.Store], HostBoard]


def test_ranks_hear_what_the_others_are_at(board: Boards) -> None:
    """By the clock of whoever hears it; the pid of a process of another host is none that could be signalled here."""
    store = dist.HashStore()
    first, second = board(0, store), board(1, store)
    second.note("backward")
    until(lambda: first.places()[1].count == 2)
    own, other = first.places()
    assert (own.what, own.host, other.what, other.host) == ("starting", "a", "backward", "b")
    assert (own.pid, other.pid) == (os.getpid(), 0)
    assert abs(time.monotonic() - other.since_s) < PATIENCE_S
    first.note("forward")
    first.note("sum")
    told = stall_of(first.places(), time.monotonic() + 20.0, 10.0, 100.0)
    assert "in 'sum' for rank 1 on host b (in" in told


def test_a_rank_that_is_not_heard_of_is_lost_with_its_host(board: Boards) -> None:
    """After the bound, and not before; a standstill of this host is no silence of others."""
    store = dist.HashStore()
    first, second = board(0, store), board(1, store)
    until(lambda: first.places()[1].count)
    second.close()
    now_s = time.monotonic()
    assert first.lost(now_s) == ""
    assert first.lost(now_s + 60.0).startswith("rank 1 on host b sent no message for ")
    assert first.lost(now_s + 60.0, forgiven_s=now_s + 58.0) == ""


def test_a_life_that_is_over_is_told_of(board: Boards) -> None:
    """By a rank that began anew."""
    store = dist.HashStore()
    first = board(0, store)
    store.set(OVER, "rank 1 on host b was restarted")
    until(lambda: first.lost(time.monotonic()))
    assert first.lost(time.monotonic()) == "rank 1 on host b was restarted"


def test_a_store_that_is_gone_takes_the_first_rank_with_it(board: Boards) -> None:
    """It lives in its process."""

    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    second = board(1, Gone())
    until(lambda: second.lost(time.monotonic()))
    assert second.lost(time.monotonic()) == "rank 0 on host a is gone: Connection reset by peer"


def test_other_ranks_wait_for_the_end_of_the_first(board: Boards) -> None:
    """It may still be needed, and they with it; the first one waits until they know."""
    store = dist.HashStore()
    first, second = board(0, store), board(1, store)
    asked = iter([False, False, True])
    assert second.end_together(lambda: next(asked)) == "", "told to stop, it waits no longer"
    assert first.end_together(lambda: False) == ""
    assert second.end_together(lambda: False) == ""
    assert store.check(["left/1"])


def test_a_rank_that_waits_for_the_end_of_one_that_is_lost_says_so(board: Boards) -> None:
    store = dist.HashStore()
    second = board(1, store)
    store.set(OVER, "rank 0 on host a was restarted")
    assert second.end_together(lambda: False) == "rank 0 on host a was restarted"
