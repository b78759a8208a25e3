"""An engine of a policy that does not learn proves, after every start, that it serves the policy's own folder."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import EngineError, EngineLost, RoleFailed, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.rollout.frozen import FROZEN, MAX_LOST_IN_A_ROW, FrozenLife
from mrl.rollout.sampling import Sampler
from mrl.rollout.scoring import Scorer
from mrl.weights.canary import canary_sequences
from mrl.weights.own_folder import describe_folder

TEXTS = canary_sequences(1000)


class Silence:
    """An exchange from which nothing comes."""

    def take(self) -> list:
        return []

    def publish(self, records) -> None:
        raise AssertionError("nothing was asked")


@pytest.fixture
def folder(tiny_model, tmp_path) -> Callable[..., Path]:
    """The folder of a model made of a seed, its first layer off by something."""

    def make(name: str, *, seed: int, off: float = 0.0) -> Path:
        model = tiny_model(seed=seed, vocab_size=1000)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight += off
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        return tmp_path / name

    return make


@pytest.fixture
def life(folder, pool, receiver) -> Callable[..., tuple[FrozenLife, EmbeddedEngine]]:
    """A worker whose engine serves one folder, and whose policy's folder is another, or the same."""

    def make(served: Path, wanted: Path) -> tuple[FrozenLife, EmbeddedEngine]:
        engine = EmbeddedEngine(served, Sampling(1.0, 8, (1,)), device="cpu", max_running=4)
        prompt = np.array([3, 5, 9], dtype=np.int32)
        sampler = Sampler("teacher", 1, engine, pool, lambda text: prompt, receiver.completion_bytes)
        scorer = Scorer(sampler, receiver, Silence(), max_answer_tokens=64, keeps_step=False)
        telemetry = Telemetry("worker/teacher/0", "teacher", lambda record: True)
        return FrozenLife(scorer, engine, telemetry, manifest=describe_folder(wanted, "teacher", FROZEN, TEXTS)), engine

    return make


def times(count: int) -> Callable[[], bool]:
    """Stops after so many turns."""
    turns = iter(range(count))
    return lambda: next(turns, None) is None


def test_an_engine_that_serves_the_folder_is_believed(life, folder):
    """And bears the only version that there is."""
    teacher, engine = life(folder("a", seed=1), folder("same", seed=1))

    teacher.run(times(2))

    assert engine.version == FROZEN


def test_an_engine_of_other_weights_is_refused_in_one_line(life, folder):
    """A person has to cure it: no start will."""
    teacher, _ = life(folder("a", seed=1), folder("b", seed=2))

    with pytest.raises(
        EngineError, match=r"^policies\.teacher: the server does not serve .* got .*other bytes .* cure: "
    ):
        teacher.run(times(2))


def test_a_difference_that_no_canary_sees_is_named(life, folder):
    """The engine says what bytes it holds."""
    teacher, _ = life(folder("a", seed=1), folder("b", seed=1, off=1e-6))

    with pytest.raises(EngineError, match=r"other bytes than version 0\.0 in .*layers\.0\.mlp\.up_proj"):
        teacher.run(times(2))


@pytest.mark.parametrize("error", [WeightsError("the folder is gone"), ValueError("shapes")])
def test_an_engine_that_cannot_be_asked_is_refused(life, folder, monkeypatch, error):
    """As one that takes no sequence as long as the canary's."""

    def fail(engine) -> None:
        raise error

    monkeypatch.setattr(EmbeddedEngine, "checksums", fail)
    teacher, _ = life(folder("a", seed=1), folder("a", seed=1))

    with pytest.raises(EngineError, match=f"cannot be proved: {error}"):
        teacher.run(times(2))


def test_what_a_restart_brings_is_proved_anew(life, folder):
    """The engine is lost once, and comes up with other weights."""
    good, other = folder("a", seed=1), folder("b", seed=2)
    teacher, engine = life(good, good)
    serve, turns = teacher._scorer.serve, []

    def lost_at_the_second_turn() -> int:
        turns.append(engine.version)
        if len(turns) == 2:
            engine._model_folder = other
            raise EngineLost("the server ended with code 1")
        return serve()

    teacher._scorer.serve = lost_at_the_second_turn
    with pytest.raises(EngineError, match="does not serve the weights"):
        teacher.run(times(5))

    assert turns == [FROZEN, FROZEN], "nothing is scored before the proof"


@pytest.mark.parametrize("losses", [MAX_LOST_IN_A_ROW, MAX_LOST_IN_A_ROW + 1])
def test_an_engine_that_does_not_come_up_at_once_is_started_again_a_few_times(life, folder, monkeypatch, losses):
    """Its restart may fail as its life may."""
    restart, left, restarts = EmbeddedEngine.restart, ["lost"] + ["no memory"] * (losses - 1), []

    def fails(engine) -> None:
        if left:
            raise EngineLost(left.pop(0))
        restarts.append(restart(engine))

    monkeypatch.setattr(EmbeddedEngine, "restart", fails)
    own = folder("a", seed=1)
    teacher, engine = life(own, own)
    serve = teacher._scorer.serve

    def lost() -> int:
        if "lost" in left:
            raise EngineLost(left.pop(0))
        return serve()

    teacher._scorer.serve = lost
    if losses > MAX_LOST_IN_A_ROW:
        with pytest.raises(RoleFailed, match=r"lost 3 times without one score: no memory"):
            teacher.run(times(9))
    else:
        teacher.run(times(9))
        assert (engine.version, left, len(restarts)) == (FROZEN, [], 1)
