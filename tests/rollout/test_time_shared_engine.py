"""Engines that have one device in turns: what is in flight rests and goes on, and nobody computes beside another."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mrl.allocation import device_turn
from mrl.allocation.device_turn import DeviceTurn
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import EngineUsage, GenerationRequest, Sampling, generate_all
from mrl.engines.token_sampling import answer_seeds
from mrl.errors import EngineLost, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.records.version import Version
from mrl.rollout import time_shared_engine
from mrl.rollout.time_shared_engine import Movable, TimeSharedEngine

MAX_TOKENS = 200


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    tiny_model(seed=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def made(monkeypatch):
    """Engines in turns, closed in the end; a turn is a fiftieth of a second at least."""
    monkeypatch.setattr(time_shared_engine, "MIN_TURN_S", 0.02)
    engines: list[TimeSharedEngine] = []
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


def in_turns(
    name: str, folder: Path, tmp_path: Path, *, stopping=lambda: False
) -> tuple[TimeSharedEngine, list[Watched]]:
    watched: list[Watched] = []

    def make() -> Movable:
        watched.append(Watched(name, folder))
        return Movable(watched[0].engine, watched[0].leave, watched[0].come)

    telemetry = Telemetry(f"worker/{name}/0", name, lambda record: None)
    turn = DeviceTurn(tmp_path / "turns", f"worker/{name}/0", ["cpu"])
    return TimeSharedEngine(turn, make, telemetry=telemetry, stopping=stopping), watched


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


def test_a_place_in_the_queue_that_nobody_needs_any_more_is_given_back(folder, tmp_path, made):
    """Else it would get the turn, and never take it."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    engine.submit(requests(1))
    first, second = (DeviceTurn(tmp_path / "turns", f"learner/{name}", ["cpu"]) for name in "ab")
    until(lambda: first.ask() is None)
    until(first.is_awaited)

    engine.abort(["r0"])
    first.give_back()

    until(lambda: second.ask() is None)


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

    other.note_progress()

    until(lambda: engine.turns_seen > seen)
    last = DeviceTurn(tmp_path / "turns", "learner/c", ["cpu"])
    assert last.ask() is not None
    until(lambda: list(last._others(before=True))[-1].progress > 1)  # it tells whoever waits behind it
    last.give_back()
    other.give_back()
    until(lambda: engine.collect(0.01))


def test_an_engine_that_scores_all_the_time_gets_on_and_leaves_all_the_same(folder, tmp_path, made):
    """Its calls follow each other at once; another one waits."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    made.append(engine)
    engine.label(Version(0, 0))
    other, stop, seen = DeviceTurn(tmp_path / "turns", "learner/b", ["cpu"]), threading.Event(), set()

    def score() -> None:
        while not stop.is_set():
            engine.score_given([3, 4, 5])

    scoring = threading.Thread(target=score)
    engine._switch_s = 0.05  # so that it stays for a while
    scoring.start()
    try:
        until(lambda: seen.add(ahead := other.ask()) or ahead is None, 10.0)
        assert len(seen) > 3
    finally:
        stop.set()
        other.give_back()
        scoring.join(60.0)


@pytest.mark.parametrize("what", ["start", "leave", "come back", "restart"])
def test_others_see_that_a_slow_move_or_start_gets_on(tmp_path, made, monkeypatch, what):
    """None of them tells anything before its end; whoever restarts an engine that failed is waited for too."""
    monkeypatch.setattr(device_turn, "TELL_S", 0.01)
    other, seen = DeviceTurn(tmp_path / "turns", "learner/b", ["cpu"]), set()
    server = Sleeper(set())
    server.may_load.set()

    def wait() -> None:
        until(lambda: seen.add(other.ask()) or len(seen) > 4, 10.0)

    def make() -> Movable:
        if what == "start":
            wait()
        return movable

    movable = Movable(server, *(wait if what == move else lambda: None for move in ("leave", "come back")))
    server.restart = wait
    turn, telemetry = DeviceTurn(tmp_path / "turns", "worker/a/0", ["cpu"]), Telemetry("w", "a", lambda record: None)
    engine = TimeSharedEngine(turn, make, telemetry=telemetry, stopping=lambda: False)
    made.append(engine)
    if what == "restart":
        engine._failure = EngineLost("it does not answer")
        engine.restart()
    until(lambda: other.ask() is None)
    threading.Timer(0.1, other.give_back).start()
    engine.score_answers(None)

    assert len(seen) > 4


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


class Sleeper:
    """A server gives its weights away as it sleeps, and does not answer without; its loads are told when to end."""

    def __init__(self, refused: set[Version]) -> None:
        self.version: Version | None = Version(0, 0)
        self.refused, self.calls, self.may_load = refused, [], threading.Event()

    def sleep(self) -> None:
        self.version = None

    def wake(self) -> None:
        self.calls.append("wake")

    def load(self, folder: Path, version: Version, digests=None) -> None:
        self.calls.append(version)
        assert self.may_load.wait(60.0)
        if version in self.refused:
            raise WeightsError("other bytes")
        self.version = version

    def score_answers(self, request) -> Version:
        if self.version is None:
            raise WeightsError("the engine has no weights to score with")
        return self.version

    def usage(self) -> EngineUsage:
        return EngineUsage(0, 0, 0.0, 0)

    def nudge(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("refused", [set(), {Version(0, 2)}])
def test_nobody_enters_a_server_before_its_weights_new_or_old(tmp_path, made, monkeypatch, refused):
    """Where the new ones are refused it serves the old ones on."""
    monkeypatch.setattr(TimeSharedEngine, "_load_again", lambda self, loaded: self._engine.load(*loaded))
    server, found = Sleeper(refused), []
    turn = DeviceTurn(tmp_path / "turns", "worker/a/0", ["cpu"])
    movable = Movable(server, server.sleep, server.wake, keeps_weights=False)
    telemetry = Telemetry("worker/a/0", "a", lambda record: None)
    engine = TimeSharedEngine(turn, lambda: movable, telemetry=telemetry, stopping=lambda: False)
    made.append(engine)
    server.may_load.set()
    engine.load(tmp_path, Version(0, 1))
    server.may_load.clear()
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])
    until(lambda: other.ask() is None)

    def load() -> None:
        with suppress(WeightsError):
            engine.load(tmp_path, Version(0, 2))

    scoring = threading.Thread(target=lambda: found.append(engine.score_answers(None)))
    for thread in (threading.Thread(target=load), scoring):
        thread.start()
    until(lambda: engine._loads_wanted and engine._waiting == 2)
    other.give_back()
    until(lambda: server.calls[1:] == ["wake", Version(0, 2)])
    assert scoring.is_alive()
    server.may_load.set()
    scoring.join(60.0)

    assert found == [Version(0, 1 if refused else 2)]


def test_who_awaits_a_first_turn_says_how_those_ahead_get_on(tmp_path):
    """And starts nothing before."""
    other, heard = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"]), []
    until(lambda: other.ask() is None)

    def make() -> Movable:
        assert other._place is None
        raise EngineLost("started")

    def waits(turns_seen: int) -> None:
        heard.append(turns_seen)
        other.note_progress()
        if turns_seen > 2:
            other.give_back()

    turn, telemetry = DeviceTurn(tmp_path / "turns", "worker/a/0", ["cpu"]), Telemetry("w", "a", lambda record: None)
    with pytest.raises(EngineLost, match="started"):
        TimeSharedEngine(turn, make, telemetry=telemetry, stopping=lambda: False, waits=waits)
    assert heard == [1, 2, 3]


def test_an_engine_that_is_closed_in_its_turn_keeps_it(folder, tmp_path):
    """Its memory is on the device until its process ends. One that is away leaves the queue."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    engine.label(Version(0, 0))
    other = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"])
    engine.close()
    assert other.ask() is not None
    engine._turn.give_back()
    assert other.ask() is None


def test_a_call_that_waits_for_a_turn_ends_as_the_engine_is_closed(folder, tmp_path):
    """A worker that ends by an error closes it; nobody told it to stop."""
    Watched.inside = set()
    engine, _ = in_turns("a", folder, tmp_path)
    engine.label(Version(0, 0))
    other, ended = DeviceTurn(tmp_path / "turns", "learner/a", ["cpu"]), []
    until(lambda: other.ask() is None)

    def load() -> None:
        with pytest.raises(EngineLost, match="closed"):
            engine.load(folder, Version(0, 1))
        ended.append(True)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    until(lambda: engine._waiting == 1 and other.is_awaited())
    engine.close()
    loading.join(20.0)

    assert ended
    assert not other.is_awaited()


def until(condition, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
