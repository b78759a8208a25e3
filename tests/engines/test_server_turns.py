"""A real server on a device that others have in turns: it sleeps in mid-answer, and serves proved weights behind it."""

import time
from pathlib import Path

import numpy as np
import pytest

from mrl.allocation.device_turn import DeviceTurn
from mrl.engines.engine import GenerationRequest, Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.metrics.telemetry import Telemetry
from mrl.processes.engines import movable
from mrl.records.version import Version, VersionSpan
from mrl.rollout import time_shared_engine
from mrl.rollout.time_shared_engine import TimeSharedEngine
from mrl.rollout.weight_updates import install
from mrl.weights.publish import Publisher
from tests.support.engine_rig import full_forward

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
SERVED = Version(0, 3)
MAX_TOKENS = 300
BOUNDS = ServerTimeouts(start_s=400.0, silence_s=60.0, stall_s=60.0, load_s=60.0)


@pytest.mark.parametrize("backend", [VLLM, pytest.param(SGLang, marks=pytest.mark.slow)])
def test_answers_in_flight_go_on_behind_the_turns_of_others_under_weights_that_are_proved_again(
    weights, tmp_path, monkeypatch, backend
):
    """Each is whole, its log-probabilities are those of a full forward under the version that was published."""
    monkeypatch.setattr(time_shared_engine, "MIN_TURN_S", 0.05)
    monkeypatch.setattr(time_shared_engine, "KEPT_PER_SWITCH", 0.0)
    start, learnt = weights("b"), weights("a")
    proofs: list[Version] = []
    publisher = Publisher(tmp_path / "published", "a", model_folder=learnt.folder)
    manifest = publisher.publish(learnt.model, SERVED, [list(range(30, 60))])
    monkeypatch.setattr(
        time_shared_engine,
        "prove",
        lambda engine, told, prove=time_shared_engine.prove: proofs.append(prove(engine, told)),
    )
    launch = Launch(
        engine_python(backend.name, device="cpu"), start.folder, "127.0.0.1", 0, "cpu", "float32", 1, 64, 512, 0
    )
    sampling = Sampling(1.0, MAX_TOKENS, ())
    engine = TimeSharedEngine(
        DeviceTurn(tmp_path / "turns", "worker/a/0", ["cpu"]),
        lambda: movable(ServerEngine(backend(), sampling, launch=launch, log=tmp_path / "log", bounds=BOUNDS)),
        telemetry=Telemetry("worker/a/0", "a", lambda record: None),
        stopping=lambda: False,
    )
    other = DeviceTurn(tmp_path / "turns", "learner/b", ["cpu"])
    try:
        install(engine, Path(manifest), SERVED)
        prompt = np.arange(40, 60, dtype=np.int32)
        engine.submit([GenerationRequest("r", prompt, np.arange(8, dtype=np.uint64))])
        for _ in range(2):
            until(lambda: other.ask() is None)
            assert engine.is_away
            assert engine.version == SERVED
            assert engine._engine.version is None
            assert engine.collect(0.05) == []
            other.give_back()
            until(lambda: not engine.is_away)
        found = []
        until(lambda: found.extend(engine.collect(0.1)) or len(found) == 8, within_s=200.0)
    finally:
        engine.close()

    assert len(proofs) == 2
    for one in found:
        answer = one.generation
        assert answer.versions == [VersionSpan(MAX_TOKENS, SERVED)]
        row = [*prompt.tolist(), *answer.token_ids.tolist()]
        np.testing.assert_allclose(answer.logprobs, full_forward([(learnt, row)], 1.0)[len(prompt) - 1 :], atol=1e-4)


def until(condition, within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
