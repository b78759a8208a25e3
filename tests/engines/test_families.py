"""Policies of every family learn, are published and served: canary, log-probabilities of samples, every byte."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, Sampling
from mrl.engines.environment import engine_python
from mrl.engines.family_limits import check_learning
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.errors import EngineError
from mrl.models.load_policy import load_policy
from mrl.models.parameters import named_weights
from mrl.models.skeleton import config_of_folder
from mrl.rollout.weight_updates import install
from tests.support.engine_rig import EOS_IDS, Rig, Weights
from tests.support.family_rig import FAMILIES, Learner, Learnt, make_family

TOLERANCE_NATS = 1e-4
SAMPLING = Sampling(0.7, 24, EOS_IDS)
LORA = {"rank": 3, "alpha": 7}
REFUSED: dict[type[VLLM] | type[SGLang], tuple[str, ...]] = {
    VLLM: ("cohere2", "deepseek_v3"),
    SGLang: ("mistral", "phi3", "gemma", "gemma2", "olmo3", "cohere2", "deepseek_v3"),
}
"""Of these policies, whose windows are short."""
SERVED = [(backend, family) for backend, refused in REFUSED.items() for family in FAMILIES if family not in refused]


@pytest.fixture
def learnt(tmp_path) -> Callable[[str], Learnt]:
    """A policy of a family that has learnt, in this way, and was published."""

    def learn(family: str, **learner: object) -> Learnt:
        return Learner(tmp_path / "published", make_family(tmp_path / "start", family), **learner).learn(3)

    return learn


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[[ServerBackend, Learnt], Engine]]:
    """A real server, started from the folder that the learner began with."""
    started = []

    def start(backend: ServerBackend, learnt: Learnt) -> Engine:
        python = engine_python(backend.name, device="cpu")
        launch = Launch(python, learnt.start, "127.0.0.1", 0, "cpu", "float32", 1, 16, 128, 0)
        engine = ServerEngine(
            backend, SAMPLING, launch=launch, log=tmp_path / "server.log", bounds=ServerTimeouts(start_s=240.0)
        )
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def check_served(engine: Engine, learnt: Learnt) -> None:
    """The engine proves the published weights whole, and samples as they do."""
    installed = install(engine, learnt.manifest, learnt.version)
    rig = Rig(engine, SAMPLING.temperature)
    rig.served[learnt.version] = Weights(learnt.manifest.parent, learnt.model)
    request = rig.ask(answers=4, prompt_tokens=12)
    engine.submit([request])
    for one in rig.collect(4):
        expected = rig.expected(request, one, keeps_cache=False)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)
    assert installed.gap.max_nats <= TOLERANCE_NATS
    assert installed.compared_share == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedded_engine_serves_what_a_learner_of_the_family_publishes(learnt, family):
    """After steps that moved the canary by far more than its bound."""
    policy = learnt(family)

    check_served(EmbeddedEngine(policy.start, SAMPLING, device="cpu", max_running=16), policy)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_embedded_engine_serves_the_adapters_of_a_learner_of_the_family(learnt, family):
    """From their bytes alone, beside the weights of the folder that the learner began with."""
    policy = learnt(family, lr=1e-2, lora=LORA)
    engine = EmbeddedEngine(policy.start, SAMPLING, device="cpu", max_running=16)

    check_served(engine, policy)

    wanted = named_weights(load_policy(policy.start))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in named_weights(engine._model).items())
    assert not list(policy.manifest.parent.glob("model*"))


def check_startable(backend: ServerBackend, folder: Path) -> None:
    """What a worker looks at before it starts a server for a policy that learns. Raises EngineError."""
    check_learning(backend.name, folder, config_of_folder(folder), device="cpu", adapters=False)
    backend.command(Launch(Path("python"), folder, "127.0.0.1", 0, "cpu", "float32", 1, 16, 128, 0))


@pytest.mark.parametrize(("backend", "family"), [(backend, family) for backend in REFUSED for family in FAMILIES])
def test_a_server_is_not_started_for_a_family_that_it_computes_otherwise(tmp_path, family, backend):
    """In one line; all others are served, as the slow tests below see with real servers."""
    folder = make_family(tmp_path, family)
    if family in REFUSED[backend]:
        with pytest.raises(EngineError, match=f"{backend.name} (does not|computes|cannot|on a CPU)"):
            check_startable(backend(), folder)
    else:
        check_startable(backend(), folder)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "family"), SERVED)
def test_a_server_serves_what_a_learner_of_the_family_publishes(learnt, serve, family, backend):
    """As the embedded engine does."""
    policy = learnt(family)

    check_served(serve(backend(), policy), policy)
