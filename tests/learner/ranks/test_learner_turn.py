"""A learner waits for its turn as long as whoever has it gets on, and no longer than a bound where that one hangs."""

import time
from types import SimpleNamespace

import pytest
import torch

from mrl.allocation import device_turn
from mrl.allocation.device_turn import DeviceTurn
from mrl.errors import PeerLost
from mrl.learner.ranks import learner_turn
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.ranks.world import World
from mrl.metrics.telemetry import Telemetry

BOUND_S = 10.0


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.whenever = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += 4.0
        self.whenever()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(learner_turn, "time", made)
    return made


@pytest.fixture
def other(tmp_path) -> DeviceTurn:
    """Whoever has the turn."""
    made = DeviceTurn(tmp_path, "worker/b/0", ["cpu"])
    assert made.ask() is None
    return made


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("learner/a", "a", lambda record: None)


@pytest.fixture
def own(tmp_path, telemetry) -> LearnerTurn:
    lease = DeviceTurn(tmp_path, "learner/a", ["cpu"])
    return LearnerTurn(World(0, 1, torch.device("cpu")), telemetry, lease, shares=True, bound_s=BOUND_S)


def test_a_holder_that_stands_still_is_named(own, other, clock):
    with pytest.raises(PeerLost, match=r"worker/b/0 holds the device .* and made no progress for 10 s"):
        own.take(lambda: False)
    assert BOUND_S < clock.now_s < BOUND_S + 5.0


def test_what_a_learner_did_last_ends_before_another_has_the_turn(own, other, telemetry):
    """Else the timeline would show two at once."""
    other.give_back()
    told: list[str] = []
    own.has(SimpleNamespace(leave_device=lambda: told.append(telemetry.beat().doing)), None)
    assert own.take(lambda: False)
    telemetry.doing("publishing")

    own.leave()

    assert told == ["moving off the device"]


def test_a_holder_that_is_slow_and_gets_on_is_waited_for(own, other, clock, telemetry):
    """For ten times the bound, while the heartbeat names it, and the learner's own peers hear that it gets on."""
    heard: list[float] = []
    beats = []
    own.has(SimpleNamespace(leave_device=lambda: None, come_to_device=lambda: None), lambda: heard.append(clock.now_s))

    def whenever() -> None:
        other.note_progress()
        beats.append(telemetry.beat())
        if clock.now_s > 10 * BOUND_S:
            other.give_back()

    clock.whenever = whenever

    assert own.take(lambda: False)
    assert own.take_times()["time/wait_for_turn_s"] == clock.now_s > 10 * BOUND_S
    assert len(heard) > 20
    assert (beats[3].awaiting, beats[3].whom) == ("device turn", "worker/b/0")


def test_who_waits_behind_one_that_waits_sees_whether_the_first_of_all_gets_on(other, clock, tmp_path, telemetry):
    """They share no device; the one between shares one with each."""
    between, own = (
        LearnerTurn(World(0, 1, torch.device("cpu")), telemetry, lease, shares=True, bound_s=BOUND_S)
        for lease in (DeviceTurn(tmp_path, "b", ["cpu", "1"]), DeviceTurn(tmp_path, "c", ["1"]))
    )
    assert not between.take(lambda: True)

    def whenever() -> None:
        if clock.now_s < 10 * BOUND_S:
            other.note_progress()
        between.take(lambda: True)

    clock.whenever = whenever
    with pytest.raises(PeerLost, match="holds the device"):
        own.take(lambda: False)
    assert 10 * BOUND_S < clock.now_s < 12 * BOUND_S + 5.0


def test_a_holder_that_stands_still_is_named_however_often_the_wait_is_looked_at(own, other, clock):
    """As a first turn is: the other ranks hear every minute that it is waited for."""
    while clock.now_s <= BOUND_S:
        assert not own.take(lambda: True)
        clock.sleep(0.0)

    with pytest.raises(PeerLost, match="worker/b/0"):
        own.take(lambda: True)


def test_a_learner_that_is_told_to_stop_waits_no_longer(own, other):
    assert not own.take(lambda: True)
    assert not own.begin(lambda: True)


def test_memory_has_left_before_the_turn_is_given_back(own, other):
    """And comes behind the turn."""
    at: list[str] = []
    held = SimpleNamespace(
        leave_device=lambda: at.append(f"leaves {other.ask()}"), come_to_device=lambda: at.append("comes")
    )
    own.has(held, None)
    other.give_back()
    assert own.begin(lambda: False)
    own.come()
    own.leave()

    assert own.take_times().keys() == {"time/wait_for_turn_s", "time/move_s"}
    assert at == ["comes", "leaves Ahead(holder='learner/a', progress=0)"]
    assert other.ask() is None


def test_others_see_that_a_slow_move_gets_on(own, other, monkeypatch):
    monkeypatch.setattr(device_turn, "TELL_S", 0.01)
    seen = set()

    def come() -> None:
        deadline_s = time.monotonic() + 20.0
        while len(seen) < 3:
            assert time.monotonic() < deadline_s
            seen.add(other.ask())

    own.has(SimpleNamespace(leave_device=lambda: None, come_to_device=come), None)
    other.give_back()
    assert own.begin(lambda: False)
    own.come()


def test_a_device_of_its_own_is_there_at_once(telemetry):
    alone = LearnerTurn(World(0, 1, torch.device("cpu")), telemetry)
    alone.has(SimpleNamespace(leave_device=pytest.fail, come_to_device=pytest.fail), None)

    assert alone.begin(lambda: True)
    assert alone.take(lambda: True)
    alone.come()
    alone.leave()
    assert alone.take_times() == {}
