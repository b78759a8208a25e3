"""An engine of a policy that does not learn proves, after every start, that it serves the policy's own folder."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import EngineError, EngineLost, RoleFailed, WeightsError
from mrl.metrics.telemetry import Telemetry
from mrl.records.telemetry_messages import MetricsRecord
from mrl.rollout.frozen import FROZEN, MAX_LOST_IN_A_ROW, PROVE_AGAIN_S, FrozenLoop
from mrl.rollout.frozen_evaluation import FrozenEvaluation
from mrl.rollout.peer_scoring import Scorer
from mrl.rollout.sampling import Sampler
from mrl.weights.canary import canary_sequences
from mrl.weights.frozen_manifest import describe_folder

TEXTS = canary_sequences(1000)


class Silence:
    """An exchange from which nothing comes."""

    def take(self) -> list:
        return []

    def publish(self, records) -> None:
        raise AssertionError("nothing was asked")

    def losses(self) -> dict[str, float]:
        return {}


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
def life(folder, pool, receiver) -> Callable[..., tuple[FrozenLoop, EmbeddedEngine]]:
    """A worker whose engine serves one folder, and whose policy's folder is another, or the same."""

    def make(served: Path, wanted: Path, **options) -> tuple[FrozenLoop, EmbeddedEngine]:
        engine = EmbeddedEngine(served, Sampling(1.0, 8, (1,)), device="cpu", max_running=4)
        prompt = np.array([3, 5, 9], dtype=np.int32)
        sampler = Sampler("teacher", 1, engine, pool, lambda text: prompt, receiver.completion_bytes)
        scorer = Scorer(sampler, receiver, Silence(), max_answer_tokens=64, keeps_step=False)
        telemetry = Telemetry("worker/teacher/0", "teacher", lambda record: True)
        manifest = describe_folder(wanted, "teacher", FROZEN, TEXTS)
        return FrozenLoop(scorer, engine, telemetry, manifest=manifest, **options), engine

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
        EngineError,
        match=r"^policies\.teacher: the server does not serve .* got .*weights differ from version .* cure: ",
    ):
        teacher.run(times(2))


def test_a_difference_that_no_canary_sees_is_named(life, folder):
    """The engine says what bytes it holds."""
    teacher, _ = life(folder("a", seed=1), folder("b", seed=1, off=1e-6))

    with pytest.raises(EngineError, match=r"weights differ from version 0\.0 in .*layers\.0\.mlp\.up_proj"):
        teacher.run(times(2))


@pytest.mark.parametrize("error", [WeightsError("the folder is gone"), ValueError("shapes")])
def test_an_engine_that_cannot_be_asked_is_refused(life, folder, monkeypatch, error):
    """As one that takes no sequence as long as the canary's."""

    def fail(engine) -> None:
        raise error

    monkeypatch.setattr(EmbeddedEngine, "checksums", fail)
    teacher, _ = life(folder("a", seed=1), folder("a", seed=1))

    with pytest.raises(EngineError, match=f"could not be verified: {error}"):
        teacher.run(times(2))


def test_weights_that_somebody_changes_meanwhile_are_found_out_and_loaded_anew(life, folder):
    """At the next proof; until it is due nobody looks. The restart has them from the folder again."""
    good, now_s, turns = folder("a", seed=1), [0.0], []
    teacher, engine = life(good, good, clock=lambda: now_s[0])
    serve, restart, restarts = teacher._scorer.serve, engine.restart, []

    def change_after_a_turn() -> int:
        turns.append(len(restarts))
        if len(turns) == 2:
            with torch.no_grad():
                engine._model.model.layers[0].mlp.up_proj.weight += 1e-6
        if len(turns) == 4:
            now_s[0] = PROVE_AGAIN_S
        return serve()

    def restarted() -> None:
        restarts.append(True)
        restart()

    teacher._scorer.serve, engine.restart = change_after_a_turn, restarted
    teacher.run(times(7))

    assert turns == [0, 0, 0, 0, 1, 1]
    assert engine.version == FROZEN


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
        with pytest.raises(RoleFailed, match=r"lost 3 times in a row without a score: no memory"):
            teacher.run(times(9))
    else:
        teacher.run(times(9))
        assert (engine.version, left, len(restarts)) == (FROZEN, [], 1)


@pytest.fixture
def evaluated_life(folder, pool, receiver, tmp_path) -> Callable[..., SimpleNamespace]:
    """A frozen policy's worker that evaluates it; between two turns somebody looks at `scored`."""

    def make(*, max_answers: int = 1) -> SimpleNamespace:
        own = folder("own", seed=1)
        engine = EmbeddedEngine(own, Sampling(1.0, 8, (1,)), device="cpu", max_running=4)
        sampler = Sampler(
            "teacher", 1, engine, pool, lambda text: np.array([3, 5, 9], dtype=np.int32), receiver.completion_bytes
        )
        scorer = Scorer(sampler, receiver, Silence(), max_answer_tokens=64, keeps_step=False)
        told: list[object] = []
        telemetry = Telemetry("worker/teacher/0", "teacher", told.append)
        evaluation = FrozenEvaluation(
            sampler, telemetry, FROZEN, pool.held_out, folder=tmp_path, max_answers=max_answers, share=0.5
        )
        life = FrozenLoop(scorer, engine, telemetry, evaluation=evaluation)
        at_once, submit = [], engine.submit

        def noted(requests) -> None:
            submit(requests)
            at_once.append(evaluation._pass._flights.num_answers)

        engine.submit = noted  # type: ignore[method-assign]
        return SimpleNamespace(life=life, told=told, at_once=at_once, result=tmp_path / "teacher-0.json")

    return make


def test_a_frozen_policy_is_evaluated_once_between_score_requests(evaluated_life):
    """It goes on scoring meanwhile, and is idle afterwards."""
    here = evaluated_life()
    serve, served = here.life._scorer.serve, []
    here.life._scorer.serve = lambda: served.append(here.result.exists()) or serve()

    here.life.run(lambda: here.result.exists() and len(served) > 20)

    assert served.count(False) > 1
    result = json.loads(here.result.read_text())
    assert (result["policy"], result["step"], result["missing"], result["own_token_share"]) == ("teacher", 0, 0, 1.0)
    values = [record.values for record in here.told if isinstance(record, MetricsRecord)]
    assert [one["eval/accuracy"] for one in values if "eval/accuracy" in one] == [result["accuracy"]]


def test_an_engine_that_is_lost_with_held_out_prompts_costs_them_and_not_the_worker(evaluated_life, monkeypatch):
    """The last prompt of the two takes it down each time; then it is given up."""
    here, collect = evaluated_life(), EmbeddedEngine.collect

    def lost(engine, timeout_s):
        evaluation = here.life._evaluation
        if any(flight.item.ticket.endswith(".1") for flight in evaluation._pass._flights._flying.values()):
            raise EngineLost("the server ended with code 1")
        return collect(engine, timeout_s)

    monkeypatch.setattr(EmbeddedEngine, "collect", lost)

    here.life.run(here.result.exists)

    assert json.loads(here.result.read_text())["missing"] == 1


@pytest.mark.parametrize(("is_asked", "most"), [(True, 1), (False, 2)])
def test_held_out_answers_keep_to_their_share_while_peers_ask(evaluated_life, is_asked, most):
    """Half of two places; without peers that ask all of them, as of a worker without groups."""
    here = evaluated_life(max_answers=2)
    here.life._scorer.serve = lambda: int(is_asked)

    here.life.run(here.result.exists)

    assert max(here.at_once) == most
    assert json.loads(here.result.read_text())["missing"] == 0


def test_an_evaluation_under_way_at_the_end_of_the_run_is_given_up_aloud(evaluated_life, capsys):
    """It is counted, and leaves no result that few answers made; one that is over is not given up."""
    here = evaluated_life(max_answers=1)

    here.life.run(lambda: bool(here.at_once))

    assert not here.result.exists()
    (values,) = [record.values for record in here.told if isinstance(record, MetricsRecord)]
    missing = int(values["eval/missing_answers"])  # one may be over before the end is noticed
    assert values == {"eval/missing_answers": missing}
    assert missing in (1, 2)
    assert "evaluation abandoned" in (told := capsys.readouterr().out)
    assert f"missing={missing}" in told
    done = evaluated_life()
    done.life.run(done.result.exists)
    assert "evaluation abandoned" not in capsys.readouterr().out
