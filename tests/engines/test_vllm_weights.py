"""New weights in a real vLLM on a CPU: what it serves is what the folder holds, and every planted fault is found."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.vllm import VLLM
from mrl.errors import WeightsError
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences
from tests.support.engine_rig import EOS_IDS, VOCAB_SIZE, Weights, full_forward, make_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
TEXTS = canary_sequences(VOCAB_SIZE)
K_PROJ = "model.layers.{}.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Weights:
    """Weights of a Llama whose head is not tied, as the learner has them."""
    return make_weights(tmp_path_factory.mktemp("llama") / "learnt", seed=2, family="llama", tied=False)


@pytest.fixture(scope="module")
def engine(learnt, tmp_path_factory) -> Iterator[ServerEngine]:
    """A server that was started with other weights."""
    folder = tmp_path_factory.mktemp("vllm")
    start = make_weights(folder / "start", seed=1, family="llama", tied=False)
    python = engine_python("vllm", device="cpu")
    launch = Launch(python, start.folder, "127.0.0.1", 0, "cpu", "float32", 1, 8, 64, 0)
    bounds = ServerTimeouts(start_s=400.0, load_s=60.0)
    made = ServerEngine(VLLM(), Sampling(1.0, 8, EOS_IDS), launch=launch, log=folder / "server.log", bounds=bounds)
    yield made
    made.close()


@pytest.fixture
def published(learnt, tmp_path) -> Callable[..., Path]:
    """A folder with the learnt tensors after `change`."""

    def publish(change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        tensors = safetensors.torch.load_file(learnt.folder / "model.safetensors")
        change(tensors)
        (tmp_path / "config.json").write_text((learnt.folder / "config.json").read_text())
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return publish


def gap_nats(engine: ServerEngine, learnt: Weights) -> float:
    """What a canary sees."""
    expected = [full_forward([(learnt, text)], 1.0) for text in TEXTS]
    return float(np.abs(np.array(engine.score(TEXTS)) - np.array(expected)).max())


def differing(engine: ServerEngine, learnt: Weights) -> set[str]:
    """Tensors that the engine holds with other bytes than the learner."""
    held, wanted = engine.checksums(), learnt.digests()
    assert held is not None
    assert held.keys() == wanted.keys()
    return {name for name in wanted if held[name] != wanted[name]}


def test_new_weights_are_served_to_the_bit(engine, learnt):
    """Fused tensors are taken apart again, and the head is another tensor than the embedding."""
    engine.label(Version(0, 0))
    drawn = {name for name in learnt.digests() if "norm" not in name}  # norms are ones, whatever the seed
    assert differing(engine, learnt) == drawn, "the bytes of the start are told, too"
    assert gap_nats(engine, learnt) > 0.1

    engine.load(learnt.folder, Version(0, 1))

    assert gap_nats(engine, learnt) < 1e-4
    assert differing(engine, learnt) == set()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_one_step_at_a_tiny_rate_is_seen_by_the_checksum_alone(engine, learnt, published, name):
    """An engine that is behind by one step at learning rate 1e-6 agrees with the learner within any canary's bound."""
    engine.load(published(lambda tensors: tensors[name].sub_(1e-6)), Version(0, 2))

    assert gap_nats(engine, learnt) < 1e-4
    assert differing(engine, learnt) == {name}


def test_two_tensors_that_changed_places_are_named(engine, learnt, published):
    """They have the same shape, so that nothing else would complain."""
    first, second = K_PROJ.format(0), K_PROJ.format(1)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    engine.load(published(swap), Version(0, 3))

    assert differing(engine, learnt) == {first, second}
    assert gap_nats(engine, learnt) > 1e-2


def test_where_nothing_is_packed_vllm_reloads_itself_and_its_own_hashes_tell_the_same(engine, learnt, published):
    """As it is on a GPU: a tensor that differs is named, with those that it is fused with."""
    engine._backend._swaps_tensors = False
    try:
        engine.load(learnt.folder, Version(0, 6))
        assert gap_nats(engine, learnt) < 1e-4
        assert differing(engine, learnt) == set()
        with pytest.raises(WeightsError, match="the tensors differ from those that the engine serves"):
            engine.load(published(lambda tensors: tensors.pop(K_PROJ.format(1))), Version(0, 7))
        assert gap_nats(engine, learnt) < 1e-4
    finally:
        engine._backend._swaps_tensors = True


def test_a_server_that_is_stopped_in_its_sleep_serves_what_is_loaded_then(engine, learnt):
    """As on leased cores: there vLLM frees nothing, and that it is stopped is all of its sleep."""
    engine.load(learnt.folder, Version(0, 8))
    engine.sleep()
    assert engine.version is None
    server = psutil.Process(engine._process.pid)
    members = [server, *server.children(recursive=True)]
    for member in members:
        member.suspend()
    time.sleep(2.5)  # longer than connections and questions of the watchdog last
    for member in members:
        member.resume()
    engine.wake()

    engine.load(learnt.folder, Version(0, 9))

    assert gap_nats(engine, learnt) < 1e-4
    assert differing(engine, learnt) == set()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(K_PROJ.format(1)), "not written"),
        (lambda tensors: tensors.update({K_PROJ.format(1): torch.zeros(7, 64)}), "Error"),
        (lambda tensors: tensors.update({"model.layers.9.self_attn.k_proj.weight": torch.zeros(32, 64)}), "layers.9"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("nan")), "NaN"),
    ],
    ids=["one missing", "another shape", "one too many", "not a number"],
)
def test_a_folder_that_does_not_fit_changes_nothing(engine, learnt, published, change, why):
    """A half-applied update is none: tensors are exchanged when all have been read."""
    engine.load(learnt.folder, Version(0, 4))

    with pytest.raises(WeightsError, match=why):
        engine.load(published(change), Version(0, 5))

    assert engine.version == Version(0, 4)
    assert differing(engine, learnt) == set()
    assert gap_nats(engine, learnt) < 1e-4
