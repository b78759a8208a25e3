"""Weights arrive whole, verified, or not at all."""

from pathlib import Path

import msgspec
import pytest
import torch

from mrl.errors import WeightsError
from mrl.models.parameters import named_weights, replace_weights
from mrl.models.scoring import score_tokens
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, gap_nats, make_canary
from mrl.weights.fetch import fetch_weights
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher, snapshot

CANARY = canary_sequences(64, num_sequences=2, num_tokens=8)


def publish(folder: Path, model: torch.nn.Module, step: int = 1) -> Path:
    return Publisher(folder, "a").publish(model, Version(0, step), CANARY)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_installed_weights_equal_the_published_ones(tiny_model, tmp_path, family, tied):
    """An engine that installs a version computes exactly what the learner computes."""
    source, target = tiny_model(family, seed=1, tied=tied), tiny_model(family, seed=2, tied=tied)
    path = publish(tmp_path, source)
    manifest = read_manifest(path)

    replace_weights(target, fetch_weights(path, manifest))

    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert gap_nats(manifest.canary, score_tokens(target, manifest.canary.token_ids)) == 0.0


def test_tied_weights_are_published_once(tiny_model, tmp_path):
    """A tied head adds no tensor to the file."""
    tied, untied = tiny_model(tied=True), tiny_model(tied=False)

    assert len(named_weights(untied)) == len(named_weights(tied)) + 1


def test_a_flipped_byte_is_refused(tiny_model, tmp_path):
    """A file that is not what was published fails its checksum."""
    path = publish(tmp_path, tiny_model())
    weights = path.with_suffix(".safetensors")
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)

    with pytest.raises(WeightsError, match="checksum"):
        fetch_weights(path, read_manifest(path))


def test_a_missing_file_and_a_malformed_manifest_are_named(tmp_path):
    """Errors say which file is at fault."""
    with pytest.raises(WeightsError, match=r"1\.1\.json"):
        read_manifest(tmp_path / "1.1.json")
    (tmp_path / "bad.json").write_text('{"policy": 3}')
    with pytest.raises(WeightsError, match=r"\$\.policy"):
        read_manifest(tmp_path / "bad.json")


def test_weights_of_another_shape_leave_the_model_unchanged(tiny_model):
    """Names and shapes are checked before the first copy."""
    model, other = tiny_model(seed=1), tiny_model(seed=2, vocab_size=72)
    before = [parameter.clone() for parameter in model.parameters()]

    with pytest.raises(WeightsError, match="do not fit"):
        replace_weights(model, named_weights(other))
    with pytest.raises(WeightsError, match="differing names"):
        replace_weights(model, {"x": torch.zeros(1)})

    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_canary_finds_a_swapped_tensor(tiny_model):
    """Two projections of one layer swapped give another log-probability, far above the tolerance."""
    model = tiny_model()
    canary = make_canary(model, CANARY)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        swapped = attention.k_proj.weight.clone()
        attention.k_proj.weight.copy_(attention.v_proj.weight)
        attention.v_proj.weight.copy_(swapped)

    assert gap_nats(canary, score_tokens(model, CANARY)) > 10 * canary.tolerance_nats


def test_a_canary_that_is_not_a_number_never_passes(tiny_model):
    """NaN counts as an infinite gap."""
    canary = make_canary(tiny_model(), CANARY)

    assert gap_nats(canary, [[float("nan")] * 7] * 2) == float("inf")


def test_only_the_newest_versions_are_kept_and_snapshots_outlive_them(tiny_model, tmp_path):
    """Pruning removes old versions, those of an earlier life included, but not a snapshot of one."""
    model = tiny_model()
    first = Publisher(tmp_path, "a", keep=2).publish(model, Version(0, 9), CANARY)
    kept = snapshot(first, tmp_path / "kept")
    publisher = Publisher(tmp_path, "a", keep=2)
    for step in (9, 10, 11):
        publisher.publish(model, Version(1, step), CANARY)

    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "1.10.json", "1.10.safetensors", "1.11.json", "1.11.safetensors",
    ]  # fmt: skip
    assert fetch_weights(kept, read_manifest(kept)).keys() == named_weights(model).keys()


def test_the_manifest_is_plain_json(tiny_model, tmp_path):
    """Any program can read which version lies in a file."""
    path = publish(tmp_path, tiny_model(), step=7)

    assert msgspec.json.decode(path.read_bytes())["version"] == {"run_epoch": 0, "step": 7}
