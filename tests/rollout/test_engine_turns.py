"""Engines that have one device in turns: what is in flight rests and goes on, and nobody computes beside another."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mrl.allocation.device_turn import DeviceTurn
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import GenerationRequest, Sampling, generate_all
from mrl.engines.token_sampling import answer_seeds
from mrl.errors import EngineLost
from mrl.metrics.telemetry import Telemetry
from mrl.records.version import Version
from mrl.rollout import engine_turns
from mrl.rollout.engine_turns import EngineInTurns, Movable

MAX_TOKENS = 200


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    tiny_model(seed=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def made(monkeypatch):
    """Engines in turns, closed in the end; a turn is a fiftieth of a second at least."""
    monkeypatch.setattr(engine_turns, "MIN_TURN_S", 0.02)
    engines: list[EngineInTurns] = []
    yield engines
    for engine in engines:
        engine.close()


class Watched:
    """An engine whose memory really moves, and who has it on the device."""

    inside: set[str] = set()
    faults: list[str] = []

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.moves, self.inside = name, 0, Watched.inside
        self.engine = EmbeddedEngine(folder, Sampling(1.0, MAX_TOKENS, (1,)), device="cpu", max_running=16)
        self.come(comes_back=False)

    def leave(self) -> None:
        if self.engine._in_use.locked():
            self.faults.append(f"{self.name} leaves in the middle of a forward")
        self.inside.discard(self.name)
        self.engine._off_device.leave(self.engine.held())
        self.moves += 1

    def come(self, *, comes_back: bool = True) -> None:
        if self.inside:
            self.faults.append(f"{self.name} beside {self.inside}")
        self.inside.add(self.name)
        if comes_back:
            self.engine._off_device.come_back()


def in_turns(name: str, folder: Path, tmp_path: Path, *, stopping=lambda: False) -> tuple[EngineInTurns, list[Watched]]:
    watched: list[Watched] = []

    def make() -> Movable:
        watched.append(Watched(name, folder))
        return Movable(watched[0].engine, watched[0].leave, watched[0].come)

    telemetry = Telemetry(f"worker/{name}/0", name, lambda record: None)
    turn = DeviceTurn(tmp_path / "turns", f"worker/{name}/0", ["cpu"])
    return EngineInTurns(turn, make, telemetry=telemetry, stopping=stopping), watched


def requests(count: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 64, size=5).astype(np.int32) for _ in range(count)]
    return [GenerationRequest(f"r{i}", prompt, answer_seeds(0, "a", f"p{i}", 0, 4)) for i, prompt in enumerate(prompts)]


def test_two_engines_that_always_have_work_share_a_device_fairly_and_lose_nothing(folder, tmp_path, made):
    """In mid-answer their memory leaves and comes back; tokens are those of an engine that nobody disturbs."""
    alone = EmbeddedEngine(folder, Sampling(1.0, MAX_TOKENS, (1,)), device="cpu", max_running=16)
    alone.label(Version(0, 0))
    expected = generate_all(alone, requests(12))
    Watched.inside = set()
    found: dict[str, list] = {}
    moved: dict[str, int] = {}

    def live(name: str) -> None:
        engine, watched = in_turns(name, folder, tmp_path)
        made.append(engine)
        engine.label(Version(0, 0))
        found[name] = generate_all(engine, requests(12))
        moved[name] = watched[0].moves

    lives = [threading.Thread(target=live, args=(name,)) for name in "ab"]
    for one in lives:
        one.start()
    for one in lives:
        one.join(120.0)

    assert sorted(found) == ["a", "b"]
    assert Watched.faults == []
    for group, others, wanted in zip(found["a"], found["b"], expected, strict=True):
        for one, other, own in zip(group, others, wanted, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() == own.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, own.logprobs, atol=1e-4)
    assert min(moved.values()) >= 2


def test_an_engine_without_work_gives_its_turn_to_whoever_waits_and_takes_it_again_for_work(folder, tmp_path, made):
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])

    until(lambda: other.ask() is None)
    assert engine.is_away
    assert engine.version == Version(0, 0)
    threading.Timer(0.2, other.give_back).start()
    engine.submit(requests(1))
    until(lambda: engine.collect(0.01))


def test_requests_that_are_given_up_while_it_is_away_never_come(folder, tmp_path, made):
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    asked = requests(2)
    engine.submit(asked)
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])
    found = []
    until(lambda: found.extend(engine.collect(0.0)) or other.ask() is None)

    engine.abort([asked[0].request_id])
    assert engine.collect(0.01) == []
    other.give_back()
    until(lambda: found.extend(engine.collect(0.01)) or sum(one.request_id == "r1" for one in found) == 4)

    assert sum(one.request_id == "r0" for one in found) < 4
    assert engine.usage().running == engine.usage().waiting == 0


def test_who_waits_sees_that_whoever_has_the_turn_gets_on(folder, tmp_path, made):
    """Else its learner would take a slow neighbour for an engine that hangs."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    other = DeviceTurn(tmp_path / "turns", "learner/b", ["cpu"])
    until(lambda: other.ask() is None)
    threading.Thread(target=engine.submit, args=(requests(1),), daemon=True).start()
    until(lambda: engine.turns_seen > 0)
    seen = engine.turns_seen
    time.sleep(0.1)
    assert engine.turns_seen == seen

    other.got_on()

    until(lambda: engine.turns_seen > seen)
    other.give_back()
    until(lambda: engine.collect(0.01))


def test_an_engine_that_cannot_leave_is_told_of_and_keeps_its_turn_until_it_is_made_anew(folder, tmp_path, made):
    """An idle worker hears of it as it asks how full its engine is."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    leave, left = engine._leave, []

    def fail() -> None:
        raise EngineLost("it does not sleep")

    engine._leave = fail
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])
    until(lambda: left.append(other.ask()) or engine._failure is not None)
    with pytest.raises(EngineLost, match="does not sleep"):
        engine.usage()
    with pytest.raises(EngineLost, match="does not sleep"):
        engine.submit(requests(1))
    assert other.ask() is not None

    engine._leave = leave
    engine.restart()

    until(lambda: other.ask() is None)
    assert engine.usage().running == 0


def test_a_worker_that_is_told_to_stop_waits_for_no_turn(folder, tmp_path, made):
    """It starts nothing anew either."""
    Watched.inside = set()
    stop = threading.Event()
    engine, _ = in_turns("a", folder, tmp_path, stopping=stop.is_set)
    made.append(engine)
    engine.label(Version(0, 0))
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])
    until(lambda: other.ask() is None)
    stop.set()

    with pytest.raises(EngineLost, match="told to stop"):
        engine.submit(requests(1))
    engine.restart()
    with pytest.raises(EngineLost, match="told to stop"):
        in_turns("b", folder, tmp_path, stopping=stop.is_set)


def until(condition, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
