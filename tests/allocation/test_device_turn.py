"""Turns on a device: one at a time, in the order of asking, and never lost but by death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.allocation.device_turn import Ahead, DeviceTurn

HOLD = """
import os, sys
from pathlib import Path
from mrl.allocation.device_turn import DeviceTurn
turn = DeviceTurn(Path(sys.argv[1]), "dying", ["cpu"])
assert turn.ask() is None
if not os.fork():
    print("held", flush=True)
sys.stdin.read()
"""
"""With a fork that outlives it, and says when it has left the lock to it."""
CONTEND = """
import os, sys, time
from pathlib import Path
from mrl.allocation.device_turn import DeviceTurn
folder, name = Path(sys.argv[1]), sys.argv[2]
turn = DeviceTurn(folder / "turns", name, ["cpu"])
for _ in range(40):
    while turn.ask() is not None:
        time.sleep(0.0005)
    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))  # fails where another one is inside
    os.unlink(folder / "inside")
    turn.give_back()
"""


def turns(folder: Path, **devices: str) -> list[DeviceTurn]:
    return [DeviceTurn(folder, name, named.split()) for name, named in devices.items()]


def test_turns_come_in_the_order_of_asking_and_nobody_starves(tmp_path):
    """Whoever gives its turn back and asks again is behind all who have waited."""
    first, second, third = turns(tmp_path, first="cpu", second="cpu", third="cpu")

    assert first.ask() is None
    assert second.ask() == third.ask() == Ahead("first", 0)
    first.give_back()
    assert (first.ask(), second.ask(), third.ask()) == (Ahead("second", 0), None, Ahead("second", 0))
    second.give_back()
    assert (first.ask(), third.ask()) == (Ahead("third", 0), None)
    assert third.is_awaited()
    assert not first.is_awaited()


def test_devices_may_be_many(tmp_path):
    """The cores of all units of a large host."""
    many = " ".join(f"core{number}" for number in range(1000))
    first, second = turns(tmp_path, first=many, second="core999")
    assert first.ask() is None
    assert second.ask() == Ahead("first", 0)


def test_devices_of_different_processes_are_had_at_once_and_those_of_one_together(tmp_path):
    """Who waits for several devices keeps none of them from those before it; the order is one for all."""
    left, right, both, later = turns(tmp_path, left="0", right="1", both="0 1", later="1")

    assert left.ask() is None
    assert right.ask() is None
    assert both.ask() == Ahead("left", 0)
    assert later.ask() == Ahead("right", 0)
    right.give_back()
    assert later.ask() == Ahead("both", 0)
    left.give_back()
    assert both.ask() is None


def test_a_turn_passes_on_as_its_holder_is_killed(tmp_path):
    """At once: the next look finds nobody before it."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    (waiting,) = turns(tmp_path, waiting="cpu")
    assert waiting.ask() == Ahead("dying", 0)

    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(60.0)

    assert waiting.ask() is None
    assert [name for name in os.listdir(tmp_path) if name.isdigit()] == ["000000000000000002"]
    holder.communicate()


def test_who_waits_sees_that_the_holder_gets_on(tmp_path):
    first, second = turns(tmp_path, first="cpu", second="cpu")
    assert first.ask() is None
    first.note_progress()
    first.note_progress()

    assert second.ask() == Ahead("first", 2)


def test_a_place_is_given_back_without_the_turn_too(tmp_path):
    first, second = turns(tmp_path, first="cpu", second="cpu")
    assert first.ask() is None
    assert second.ask() is not None

    second.give_back()
    second.give_back()

    assert not first.is_awaited()


def test_processes_that_contend_are_never_inside_together(tmp_path):
    """Four of them, forty times each."""
    words = [sys.executable, "-c", CONTEND, str(tmp_path)]
    running = [subprocess.Popen([*words, name]) for name in "abcd"]

    assert [process.wait(120.0) for process in running] == [0] * 4


@pytest.mark.parametrize("name", ["000000000000000001", "queue"])
def test_what_dead_processes_leave_is_no_obstacle(tmp_path, name):
    """A place whose file is torn, and an empty queue."""
    (tmp_path / name).write_bytes(b"")
    (turn,) = turns(tmp_path, only="cpu")

    assert turn.ask() is None
