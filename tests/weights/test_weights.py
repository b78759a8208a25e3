"""Weights arrive whole, verified, or not at all."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrl.errors import WeightsError
from mrl.models.parameters import named_weights
from mrl.models.scoring import score_tokens
from mrl.models.tensor_file import digest, read_folder
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, gap_nats, make_canary
from mrl.weights.manifest import differing, read_manifest
from mrl.weights.publish import Publisher
from mrl.weights.read_lock import read_lock

CANARY = canary_sequences(64, num_sequences=2, num_tokens=8)


def publish(folder: Path, model: torch.nn.Module, step: int = 1, **options) -> Path:
    return Publisher(folder, "a", **options).publish(model, Version(0, step), CANARY)


def read_tensors(manifest_path: Path) -> dict[str, torch.Tensor]:
    files = manifest_path.parent.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def verify(manifest_path: Path) -> None:
    read_folder(manifest_path.parent, wanted=read_manifest(manifest_path).tensors)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_installed_weights_equal_the_published_ones(tiny_model, tmp_path, family, tied):
    """An engine that installs a version computes exactly what the learner computes."""
    source, target = tiny_model(family, seed=1, tied=tied), tiny_model(family, seed=2, tied=tied)
    path = publish(tmp_path, source)
    manifest = read_manifest(path)

    verify(path)
    published = read_tensors(path)
    assert published.keys() == named_weights(target).keys()
    target.load_state_dict(published, strict=False)  # a tied head is in the model twice

    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    gap = gap_nats(manifest.canary, score_tokens(target, manifest.canary.token_ids))
    assert (gap.max_nats, gap.problem) == (0.0, "")


def test_tied_weights_are_published_once(tiny_model, tmp_path):
    """A tied head adds no tensor to the file."""
    tied, untied = tiny_model(tied=True), tiny_model(tied=False)

    assert len(named_weights(untied)) == len(named_weights(tied)) + 1


def test_a_flipped_byte_is_refused(tiny_model, tmp_path):
    """A file that is not what was published fails its checksum."""
    path = publish(tmp_path, tiny_model())
    weights = path.with_name("model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)

    with pytest.raises(WeightsError, match="checksum"):
        verify(path)


def test_a_tensor_that_is_not_there_is_named(tiny_model, tmp_path):
    """A file that was cut to fewer tensors is not what was published."""
    path = publish(tmp_path, tiny_model())
    weights = load_file(path.with_name("model.safetensors"))
    del weights["model.norm.weight"]
    save_file(weights, path.with_name("model.safetensors"))

    with pytest.raises(WeightsError, match=r"published tensor model\.norm\.weight is missing"):
        verify(path)


def test_a_version_is_a_folder_that_transformers_loads(tiny_model, tmp_path):
    """Configuration and tokenizer lie beside the weights."""
    source = tiny_model()
    source.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    path = publish(tmp_path / "weights", source, model_folder=tmp_path / "model")

    loaded = AutoModelForCausalLM.from_pretrained(path.parent)

    assert path.with_name("tokenizer.json").read_text() == "{}"
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), loaded.parameters(), strict=True))


def test_an_engine_is_judged_by_the_tensors_that_it_knows(tiny_model, tmp_path):
    """One step at a learning rate of 1e-6 shows in the digests, though no canary could see it."""
    model = tiny_model()
    manifest = read_manifest(publish(tmp_path, model))
    held = {name: digest(tensor) for name, tensor in named_weights(model).items() if "norm" in name}

    assert differing(manifest, held) == []
    with torch.no_grad():
        model.model.norm.weight += 1e-6
    assert not gap_nats(manifest.canary, score_tokens(model, CANARY)).problem
    assert differing(manifest, held | {"model.norm.weight": digest(model.model.norm.weight)}) == ["model.norm.weight"]


def test_a_missing_file_and_a_malformed_manifest_are_named(tmp_path):
    """Errors say which file is at fault."""
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        read_manifest(tmp_path / "manifest.json")
    (tmp_path / "bad.json").write_text('{"policy": 3}')
    with pytest.raises(WeightsError, match=r"\$\.policy"):
        read_manifest(tmp_path / "bad.json")


def test_the_canary_finds_a_swapped_tensor(tiny_model):
    """Two projections of one layer swapped give another log-probability, far above rounding in 16 bits."""
    model = tiny_model()
    canary = make_canary(model, CANARY, "bfloat16")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        swapped = attention.k_proj.weight.clone()
        attention.k_proj.weight.copy_(attention.v_proj.weight)
        attention.v_proj.weight.copy_(swapped)

    gap = gap_nats(canary, score_tokens(model, CANARY))
    assert gap.mean_nats > 10 * gap.noise_nats
    assert "the mean of the differences" in gap.problem


def test_a_canary_that_is_not_a_number_never_passes(tiny_model):
    """NaN counts as an infinite gap."""
    canary = make_canary(tiny_model(), CANARY)

    gap = gap_nats(canary, [[float("nan")] * 7] * 2)
    assert (gap.max_nats, gap.problem) == (float("inf"), "log-probabilities are NaN or infinite")


def test_only_the_newest_versions_are_kept(tiny_model, tmp_path):
    """Pruning removes old versions, those of an earlier life included."""
    model = tiny_model()
    Publisher(tmp_path, "a", keep=2).publish(model, Version(0, 9), CANARY)
    publisher = Publisher(tmp_path, "a", keep=2)
    for step in (9, 10, 11):
        publisher.publish(model, Version(1, step), CANARY)

    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["1.10", "1.11"]


def test_a_version_that_is_held_is_not_pruned_before_it_is_let_go(tiny_model, tmp_path):
    """An engine is being proved against it, and some read it again for that."""
    model, publisher = tiny_model(), Publisher(tmp_path, "a", keep=1)
    first = publisher.publish(model, Version(0, 1), CANARY)
    with read_lock(first.parent):
        publisher.publish(model, Version(0, 2), CANARY)
        verify(first)
    publisher.publish(model, Version(0, 3), CANARY)

    assert [path.name for path in tmp_path.glob("[!.]*")] == ["0.3"]


def test_what_a_killed_learner_left_half_written_is_removed(tiny_model, tmp_path):
    """A version appears whole under its name; the parts of one that never was go with the next life."""
    (tmp_path / ".parts-x").mkdir()
    (tmp_path / ".parts-x" / "model-00001.safetensors").write_bytes(b"half")

    publish(tmp_path, tiny_model())

    assert [path.name for path in tmp_path.iterdir()] == ["0.1"]


def test_the_manifest_is_plain_json(tiny_model, tmp_path):
    """Any program can read which version lies in a file."""
    path = publish(tmp_path, tiny_model(), step=7)

    assert msgspec.json.decode(path.read_bytes())["version"] == {"run_epoch": 0, "step": 7}
