"""The worker extension of GPUs in a real vLLM, on a CPU: versions in the learner's memory, read back, faults named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.errors import WeightsError
from mrl.models.memory_file import SHARED
from mrl.models.parameters import weight_sources
from mrl.records.version import Version
from mrl.rollout.weight_updates import install
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher
from tests.support.engine_rig import EOS_IDS, VOCAB_SIZE, ReloadingVLLM, Weights, make_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
FROM_FILES = "weights are read from files, not from the learner's GPU"


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Weights:
    """What the server is started with."""
    return make_weights(tmp_path_factory.mktemp("start") / "a", seed=1, family="llama", tied=False)


@pytest.fixture(scope="module")
def engine(start, tmp_path_factory) -> Iterator[ServerEngine]:
    """In bfloat16, with the extension of GPUs."""
    folder = tmp_path_factory.mktemp("vllm")
    backend = ReloadingVLLM(folder)
    python = engine_python("vllm", device="cpu")
    launch = Launch(python, start.folder, "127.0.0.1", 0, "cpu", "bfloat16", 1, 8, 64, 0, backend.options)
    bounds = ServerTimeouts(start_s=700.0, load_s=60.0)
    made = ServerEngine(backend, Sampling(1.0, 8, EOS_IDS), launch=launch, log=folder / "server.log", bounds=bounds)
    yield made
    made.close()


def test_versions_in_memory_are_reloaded_and_every_byte_of_them_is_proved(engine, start, tmp_path):
    """Four, so that memory is written over on both sides; then one that is not what was published is refused."""
    publisher = Publisher(tmp_path / "weights", "a", model_folder=start.folder, dtype="bfloat16", in_memory=True)
    canary_ids = canary_sequences(VOCAB_SIZE)
    paths = []
    for step in range(1, 5):
        with torch.no_grad():
            for tensor in start.model.parameters():
                tensor.mul_(1.01)
        canary = make_canary(start.model, canary_ids, "bfloat16")
        publisher.begin(weight_sources(start.model), Version(0, step), canary, paths.append)
        publisher.finish()
        assert install(engine, paths[-1], Version(0, step)).compared_share == 1.0

    wanted = read_manifest(paths[-1]).tensors
    assert engine.checksums() == wanted
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=f"checksums differ from the published ones: {name}"):
        engine.load(paths[-1].parent, Version(0, 9), wanted | {name: "0" * 32})
    assert engine.version == Version(0, 4)
    engine.load(paths[-2].parent, Version(0, 3), read_manifest(paths[-2]).tensors)
    stale = engine.checksums()
    assert stale is not None
    assert all(stale[one] != its_digest for one, its_digest in wanted.items())
    publisher.close()


def test_versions_on_the_learners_device_are_reloaded_from_there(engine, start, tmp_path):
    """Memory of the host stands for a GPU's; files are read where it is not to be opened, and the log says so."""
    publisher = Publisher(
        tmp_path / "weights",
        "a",
        model_folder=start.folder,
        dtype="bfloat16",
        in_memory=True,
        shares_on=torch.device("cpu"),
    )
    said = Path(str(engine._log))
    for step in range(1, 5):
        with torch.no_grad():
            for tensor in start.model.parameters():
                tensor.mul_(1.01)
        version = Version(1, step)
        canary = make_canary(start.model, canary_sequences(VOCAB_SIZE), "bfloat16")
        path = publisher.publish_weights(
            ((source.name, source.whole()) for source in weight_sources(start.model)), version, canary
        )
        if step == 4:
            told = path.with_name(f"model{SHARED}")
            told.write_text(told.read_text().replace("/proc/", "/nowhere/"))
        else:  # there is nothing in it to read
            file = path.with_name("model.safetensors")
            file.unlink()
            file.touch()
        assert install(engine, path, version).compared_share == 1.0
        assert (FROM_FILES in said.read_text()) == (step == 4)

    wanted, name = read_manifest(path).tensors, "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=f"checksums differ from the published ones: {name}"):
        engine.load(path.parent, Version(1, 9), wanted | {name: "0" * 32})
    assert engine.version == Version(1, 4)
    publisher.close()
