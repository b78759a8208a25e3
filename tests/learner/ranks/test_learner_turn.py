"""A learner waits for its turn as long as whoever has it gets on, and no longer than a bound where that one hangs."""

from types import SimpleNamespace

import pytest
import torch

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
    with pytest.raises(PeerLost, match=r"worker/b/0 has the device .* and stood still for 10 s"):
        own.take(lambda: False)
    assert BOUND_S < clock.now_s < BOUND_S + 5.0


def test_a_holder_that_is_slow_and_gets_on_is_waited_for(own, other, clock, telemetry):
    """For ten times the bound, while the heartbeat names it, and the learner's own peers hear that it gets on."""
    heard: list[float] = []
    beats = []
    own.has(SimpleNamespace(leave_device=lambda: None, come_to_device=lambda: None), lambda: heard.append(clock.now_s))

    def whenever() -> None:
        other.got_on()
        beats.append(telemetry.beat())
        if clock.now_s > 10 * BOUND_S:
            other.give_back()

    clock.whenever = whenever

    assert own.take(lambda: False)
    assert own.take_times()["time/wait_for_turn_s"] == clock.now_s > 10 * BOUND_S
    assert len(heard) > 20
    assert (beats[3].awaiting, beats[3].whom) == ("turn", "worker/b/0")


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
    assert at == ["comes", "leaves Ahead(holder='learner/a', progress=1)"]
    assert other.ask() is None


def test_a_device_of_its_own_is_there_at_once(telemetry):
    alone = LearnerTurn(World(0, 1, torch.device("cpu")), telemetry)
    alone.has(SimpleNamespace(leave_device=pytest.fail, come_to_device=pytest.fail), None)

    assert alone.begin(lambda: True)
    assert alone.take(lambda: True)
    alone.come()
    alone.leave()
    assert alone.take_times() == {}
