import json

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from mrl.errors import DeviceError, ModelFolderError
from mrl.models.load_policy import load_policy, load_tokenizer, policy_without_values
from mrl.models.make import make_policy
from mrl.models.skeleton import config_of_folder


def ignore(step, loss):
    """Nobody watches."""


def test_a_missing_folder_is_one_line_with_the_cure(tmp_path):
    """The message names the folder and the command that makes policies."""
    with pytest.raises(
        ModelFolderError, match=r"nowhere: the model folder is missing; .*cure: `mrl policies make"
    ) as caught:
        load_policy(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", r"has no weights; .*cure: download .* or save the model there"),
        ("config.json", r"wanted config.json; cure: download .* or save the model there"),
        ("tokenizer.json", r"wanted tokenizer.json; cure: python -c .*save_pretrained"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(tmp_path, recipe, examples, missing, message):
    """Weights, configuration and tokenizer are all needed."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    (tmp_path / "p" / missing).unlink()
    with pytest.raises(ModelFolderError, match=message):
        load_policy(tmp_path / "p")


def test_a_model_that_memory_does_not_hold_is_no_fault_of_its_folder(tiny_model, tmp_path, monkeypatch):
    """Nor is a GPU that is not there."""
    tiny_model().save_pretrained(tmp_path / "p")
    (tmp_path / "p" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"GPU|CUDA"):
        load_policy(tmp_path / "p", "cuda")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: torch.empty(1 << 50))
    with pytest.raises(DeviceError, match=r"p: out of memory while loading the model; .*cure: use a smaller model"):
        load_policy(tmp_path / "p")


@pytest.mark.parametrize(
    ("broken", "load", "wanted"),
    [
        ("config.json", load_policy, "a causal language model; cure: download .* or correct its config.json"),
        ("model.safetensors", load_policy, "a causal language model; cure: download the folder again"),
        ("tokenizer.json", load_tokenizer, "a tokenizer that transformers can load; cure: .*save the tokenizer there"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, recipe, examples, broken, load, wanted):
    """Whatever the libraries raise becomes a ModelFolderError of one line."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    (tmp_path / "p" / broken).write_bytes(b"{ not what it should be")
    with pytest.raises(ModelFolderError, match=f"cannot be loaded; .*wanted {wanted}") as caught:
        load(tmp_path / "p")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", ["layers.0.mlp", "layers.0.self_attn.q_proj", "model.norm"])
def test_a_folder_without_weights_for_a_layer_is_refused(tmp_path, recipe, examples, lost):
    """The library would fill the layer with random numbers and say so in passing."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    file = tmp_path / "p" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if lost not in name}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, file, metadata={"format": "pt"})

    with pytest.raises(ModelFolderError, match=rf"p: the model folder lacks weights; got .*{lost}.*cure: ") as caught:
        load_policy(tmp_path / "p")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_policy, load_tokenizer, policy_without_values, config_of_folder])
def test_code_of_a_model_is_neither_run_nor_asked_about(tiny_model, tmp_path, monkeypatch, load):
    """The folder names modules of its own; nobody is asked at the terminal, and none is imported."""
    tiny_model().save_pretrained(tmp_path / "p")
    described = json.loads((tmp_path / "p" / "config.json").read_text()) | {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (tmp_path / "p" / "config.json").write_text(json.dumps(described))
    (tmp_path / "p" / "tokenizer.json").write_text("{}")
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (tmp_path / "p" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "p" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    with pytest.raises(ModelFolderError):
        load(tmp_path / "p")
    assert not asked
    assert not (tmp_path / "ran").exists()
