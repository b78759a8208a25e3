"""The line between a node and a worker that may sleep: words whole or not at all, and an end that both sides notice."""

import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mrl.processes.sleep_channel import SleepChannel, heard, line, say

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, its = line()
    with ours, its:
        yield ours, its


def test_words_come_whole_and_in_order_and_nothing_is_no_word(ends: Ends) -> None:
    ours, its = ends
    assert heard(its) == []
    assert [say(ours, "wake", 7), say(ours, "sleep")] == [True, True]
    assert heard(its) == ["wake 7", "sleep"]


def test_a_side_that_is_gone_is_found_gone(ends: Ends) -> None:
    """After what it said last."""
    ours, its = ends
    say(its, "asleep")
    its.close()
    assert heard(ours) == ["asleep", ""]
    assert not say(ours, "wake", 7)
    ours.close()
    assert heard(ours) == [""]


def test_a_worker_sleeps_once_it_is_told_and_wakes_by_a_word_with_an_epoch_alone(ends: Ends) -> None:
    ours, its = ends
    worker = SleepChannel(its)
    assert not worker.is_due()
    say(ours, "sleep")
    assert worker.is_due()
    assert worker.is_due(), "it stays due until it sleeps"
    for words in ("wake", "wake now", "sleep", "wake 9"):
        say(ours, words)
    assert worker.rest(lambda: False) == 9
    assert not worker.is_due()
    worker.awake(9)
    assert heard(ours) == ["asleep", "awake 9"]


def test_a_worker_that_is_to_sleep_again_before_it_ran_hears_of_it(ends: Ends) -> None:
    ours, its = ends
    worker = SleepChannel(its)
    say(ours, "wake", 7)
    say(ours, "sleep")
    assert worker.rest(lambda: False) == 7
    assert worker.is_due()


def test_a_worker_that_is_to_end_or_whose_node_is_gone_does_not_wait(ends: Ends) -> None:
    ours, its = ends
    worker = SleepChannel(its)
    looks = itertools.count()
    say(ours, "nothing")
    assert worker.rest(lambda: next(looks) > 0) is None
    ours.close()
    assert worker.rest(lambda: False) is None


def test_it_is_the_standard_input_of_a_worker_and_of_nobody_that_this_one_starts(ends: Ends) -> None:
    """They find nothing there."""
    code = (
        "import subprocess, sys; from mrl.processes.sleep_channel import SleepChannel\n"
        "line = SleepChannel.of_this_process()\n"
        "assert subprocess.run([sys.executable, '-c', 'import sys; print(repr(sys.stdin.read()))'],"
        " stdout=subprocess.PIPE, close_fds=False).stdout == b\"''\\n\"\n"
        "assert SleepChannel.of_this_process is not None\n"
        "line.awake(line.rest(lambda: False))"
    )
    ours, its = ends
    say(ours, "wake", 3)
    with its:
        subprocess.run([sys.executable, "-c", code], stdin=its, env={"MRL_UNIT_LINE": "1", **_path()}, check=True)
    assert heard(ours) == ["asleep", "awake 3", ""]


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path)}


def test_without_the_variable_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MRL_UNIT_LINE", raising=False)
    assert SleepChannel.of_this_process() is None
