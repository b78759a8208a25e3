"""An engine serves a version only after its canary has passed."""

from pathlib import Path

import msgspec
import pytest

from mrl.engines.embedded import EmbeddedEngine
from mrl.errors import WeightsError
from mrl.models.parameters import named_weights
from mrl.records.version import Version
from mrl.rollout.updates import install
from mrl.weights.canary import canary_sequences
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher

CANARY = canary_sequences(64)


@pytest.fixture
def engine(tiny_model) -> EmbeddedEngine:
    """An engine that serves nothing yet."""
    return EmbeddedEngine(tiny_model(seed=2), eos_ids=[1], max_new_tokens=4, temperature=1.0)


def publish(folder: Path, model, step: int) -> Path:
    return Publisher(folder, "a").publish(model, Version(0, step), CANARY)


def test_a_published_version_is_served_with_a_canary_gap_of_nothing(tiny_model, engine, tmp_path):
    """Publish, install: the engine computes what the learner computes and names the version."""
    installed = install(engine, publish(tmp_path, tiny_model(seed=1), 3), Version(0, 3))

    assert engine.version == Version(0, 3)
    assert installed.gap_nats < 1e-6


def test_weights_that_are_not_what_the_learner_scored_are_not_served(tiny_model, engine, tmp_path):
    """A manifest whose canary belongs to other weights, one optimizer step away, is found out."""
    honest, near = tiny_model(seed=1), tiny_model(seed=1)
    good = publish(tmp_path / "good", honest, 3)
    for tensor in named_weights(near).values():
        tensor.data += 1e-3 * (tensor.data.abs() > 0)
    lying = publish(tmp_path / "lying", near, 4)
    mixed = msgspec.structs.replace(read_manifest(lying), canary=read_manifest(good).canary)
    lying.write_bytes(msgspec.json.encode(mixed))
    install(engine, good, Version(0, 3))

    with pytest.raises(WeightsError, match="canary"):
        install(engine, lying, Version(0, 4))

    assert engine.version is None
    install(engine, good, Version(0, 3))
    assert engine.version == Version(0, 3)


def test_a_torn_file_leaves_the_served_version(tiny_model, engine, tmp_path):
    """An update that cannot be read changes nothing."""
    install(engine, publish(tmp_path, tiny_model(seed=1), 3), Version(0, 3))
    torn = publish(tmp_path, tiny_model(seed=1), 4)
    torn.with_suffix(".safetensors").write_bytes(b"torn")

    with pytest.raises(WeightsError, match="checksum"):
        install(engine, torn, Version(0, 4))

    assert engine.version == Version(0, 3)


def test_a_manifest_of_another_version_is_refused(tiny_model, engine, tmp_path):
    """What the learner announced and what the manifest describes must be the same version."""
    with pytest.raises(WeightsError, match=r"describes version 0\.3, wanted 0\.4"):
        install(engine, publish(tmp_path, tiny_model(seed=1), 3), Version(0, 4))

    assert engine.version is None
