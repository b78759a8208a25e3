"""Who is awaited when the ranks of a learner go on no longer."""

from pathlib import Path

import pytest

from mrl.learner.ranks.watchdog import ProgressBoard, RankActivity, stall_of

BOUNDS_S = (10.0, 100.0)


def place(count: int, since_s: float, what: str, alive_s: float = 1e9) -> RankActivity:
    return RankActivity(count, since_s, 1, what, alive_s)


def test_a_rank_that_is_behind_is_named_with_what_it_is_at() -> None:
    """The other waits in the sum; what rank 1 is at lasts too long, and so it is told who waits, where, how long."""
    places = [place(18, 52.0, "gradient all-reduce"), place(17, 50.0, "backward")]
    assert stall_of(places, 60.0, *BOUNDS_S) == ""
    told = stall_of(places, 61.0, *BOUNDS_S)
    assert told == "other ranks have waited 9 s in 'gradient all-reduce' for rank 1 (in 'backward' for 11 s)"


def test_all_at_one_thing_are_all_named() -> None:
    """Nobody is behind: the network, or what they all compute, is slow."""
    places = [place(5, 0.0, "backward"), place(5, 1.0, "backward")]
    assert stall_of(places, 20.0, *BOUNDS_S) == "all ranks have been in 'backward' for 20 s"


def test_a_process_that_does_not_run_is_named_though_it_came_as_far() -> None:
    """Stopped inside of the sum that the other waits in."""
    places = [place(5, 40.0, "gradient all-reduce"), place(5, 40.0, "gradient all-reduce", alive_s=41.0)]
    told = stall_of(places, 51.0, *BOUNDS_S)
    assert told.startswith("other ranks have waited 11 s in 'gradient all-reduce' for rank 1")
    assert told.endswith("; its process has not run for 10 s)")


def test_forming_a_batch_has_the_longer_bound() -> None:
    """The first rank waits for its workers then, and the others wait for it."""
    places = [
        place(8, 0.0, "forming a batch"),
        place(9, 0.0, "receiving the step"),
        place(9, 0.0, "receiving the step"),
    ]
    assert stall_of(places, 99.0, *BOUNDS_S) == ""
    assert "waited 101 s in 'receiving the step' for rank 0" in stall_of(places, 101.0, *BOUNDS_S)


def test_a_rank_that_has_not_begun_is_not_awaited() -> None:
    """Its start has a bound of its own: that of the rendezvous."""
    assert stall_of([place(1, 0.0, "starting"), RankActivity(0, 0.0, 0, "", 0.0)], 50.0, *BOUNDS_S) == ""


def test_what_happened_before_a_standstill_is_forgiven() -> None:
    """A host that slept for an hour has no rank that hangs."""
    places = [place(4, 0.0, "forward"), place(4, 0.0, "forward")]
    assert stall_of(places, 3600.0, *BOUNDS_S, forgiven_s=3595.0) == ""
    assert stall_of(places, 3606.0, *BOUNDS_S, forgiven_s=3595.0)


def test_ranks_read_each_other_on_the_board(tmp_path: Path) -> None:
    """Whoever comes first makes the file; long names are cut."""
    first = ProgressBoard(tmp_path / "board", 0, 2)
    assert [one.count for one in first.places()] == [1, 0]
    second = ProgressBoard(tmp_path / "board", 1, 2)
    second.note("x" * 100)
    first.note("backward")
    for board in (first, second):
        here, there = board.places()
        assert (here.count, here.what) == (2, "backward")
        assert (there.count, there.what) == (2, "x" * 36)
        assert here.pid == there.pid > 0
    assert here.since_s == pytest.approx(there.since_s, abs=10.0)
