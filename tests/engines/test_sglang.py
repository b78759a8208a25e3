"""What is SGLang's own, on the real server: one, with a Llama whose head is not tied."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.torch import save_file

from mrl.engines.engine import Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.errors import EngineError, WeightsError
from mrl.models.tensor_file import digest
from tests.support.engine_rig import EOS_IDS, Rig, Weights, full_forward, make_weights

pytestmark = pytest.mark.engines
TOLERANCE_NATS = 1e-4
TEXT = [7, 8, 9, 300]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Weights:
    """Heads of its own; its configuration names EOS_IDS[0] as the end of an answer."""
    return make_weights(tmp_path_factory.mktemp("llama") / "a", seed=3, family="llama", tied=False)


@pytest.fixture(scope="module")
def rig(llama, tmp_path_factory) -> Iterator[Rig]:
    """An engine that ends answers at another EOS than the model's configuration says."""
    python = engine_python("sglang", device="cpu")
    launch = Launch(python, llama.folder, "127.0.0.1", 0, "cpu", "float32", 1, 64, 256, 0)
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    bounds = ServerTimeouts(start_s=240.0, load_s=60.0)
    engine = ServerEngine(SGLang(), Sampling(1.0, 48, EOS_IDS[1:2]), launch=launch, log=log, bounds=bounds)
    yield Rig(engine, 1.0)
    engine.close()


def check_serves(rig: Rig, weights: Weights) -> None:
    expected = full_forward([(weights, TEXT)], 1.0)
    np.testing.assert_allclose(rig.engine.score([TEXT])[0], expected, atol=TOLERANCE_NATS, rtol=0)


def test_weights_of_another_shape_are_refused_before_they_end_the_server(rig, llama, tmp_path):
    """SGLang's own rollback reads the new folder once more, and dies of it."""
    version = rig.serve(llama)
    other = {name: tensor.data for name, tensor in llama.model.named_parameters()}
    other["lm_head.weight"] = other["lm_head.weight"][:-1].clone()
    save_file(other, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=r"lm_head\.weight has shape"):
        rig.engine.load(tmp_path, version)

    check_serves(rig, llama)


def test_a_server_whose_weights_are_stale_by_a_millionth_is_seen(rig, llama, tmp_path):
    """The canary cannot: such a step is smaller than its tolerance."""
    version = rig.serve(llama)
    published = {name: tensor.data.clone() for name, tensor in llama.model.named_parameters()}
    published["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-6

    held = rig.engine.checksums()

    assert held == llama.digests()
    assert {name for name in held if held[name] != digest(published[name])} == {"model.layers.1.mlp.up_proj.weight"}
    check_serves(rig, llama)
    assert rig.engine.version == version


def test_a_server_of_our_own_streams_in_parts(rig):
    """It says so itself."""
    assert rig.engine._backend._sends_parts


def test_only_the_eos_of_the_request_ends_an_answer(rig, llama):
    """The model's own is on in SGLang, and is sampled over as if it had been given up there."""
    rig.serve(llama)
    requests = [rig.ask(answers=8) for _ in range(6)]

    answers = [answer for group in generate_all(rig.engine, requests) for answer in group]

    own = EOS_IDS[0]
    assert any(own in answer.token_ids[:-1] for answer in answers), "the model never sampled its own EOS"
    for answer in answers:
        assert answer.finished == (answer.token_ids[-1] == EOS_IDS[1])
        assert answer.finished or answer.token_ids.size == 48


def test_what_was_put_to_sleep_wakes_and_serves_what_is_loaded(rig, llama):
    """On a CPU there is little to free; the routes are the same."""
    rig.serve(llama)
    engine = rig.engine
    engine._run(engine._backend.sleep(engine._http), 60.0)
    engine._run(engine._backend.wake(engine._http), 60.0)

    engine.load(llama.folder, engine.version)

    check_serves(rig, llama)


def test_scores_at_another_temperature_are_refused(rig, llama):
    """SGLang scales what it samples, not what it is given."""
    rig.serve(llama)
    backend = rig.engine._backend

    with pytest.raises(EngineError, match=r"only at temperature 1"):
        rig.engine._run(backend.score(rig.engine._http, TEXT, 0.7, 0), 60.0)


@pytest.mark.slow
def test_a_server_that_hides_the_temperature_is_named(rig):
    """One that reports log-probabilities before temperature would train with wrong importance weights."""
    raw = dataclasses.replace(rig.engine._launch, options=("--log-level", "error"))
    log = rig.engine._log.with_name("raw.log")

    class Raw(SGLang):
        def environment(self, launch: Launch) -> dict[str, str]:
            return super().environment(launch) | {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}

    with pytest.raises(EngineError, match=r"not those of the sampling distribution"):
        ServerEngine(Raw(), Sampling(1.0, 8, EOS_IDS), launch=raw, log=log, bounds=ServerTimeouts(start_s=240.0))
