"""The folders that `tools/real_sizes.py` makes are what a hub gives: here with fewer blocks, so that they are small."""

import copy
import json

import pytest
import real_sizes
import torch

from mrl.alignment.receiver import load_receiver
from mrl.models.load_policy import load_policy
from mrl.models.prompting import PromptEncoder
from mrl.models.scoring import score_tokens

pytestmark = pytest.mark.thorough


@pytest.fixture
def folder(tmp_path, monkeypatch):
    config, *rest = real_sizes.MODELS["smol"]
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    monkeypatch.setitem(real_sizes.MODELS, "smol", (small, *rest))
    monkeypatch.setattr(real_sizes, "SHARD", "100MB")
    return real_sizes.make_model("smol", tmp_path)


def test_a_folder_looks_like_one_of_a_hub(folder):
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model = load_policy(folder, dtype=torch.bfloat16)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    receiver = load_receiver(folder)
    assert len(receiver.eos_ids) == 2
    prompt = PromptEncoder(folder).token_ids("What is 2 + 2?")
    assert receiver.completion_bytes(prompt).decode() == "[INST]What is 2 + 2?[/INST]"


def test_logits_are_as_wide_as_those_of_trained_models(folder):
    """Log-probabilities of random tokens lie a few nats apart."""
    model = load_policy(folder)
    ids = torch.randint(10, 100_000, (4, 32), generator=torch.Generator().manual_seed(0)).tolist()
    spread = torch.tensor(score_tokens(model, ids)).std()
    assert 1.5 < spread < 4.0


@pytest.mark.parametrize(
    ("predicted_mib", "measured_mib", "wanted"),
    [(1000, 1150, True), (1000, 1151, False), (1500, 1001, True), (1500, 999, False)],
)
def test_a_plan_holds_where_it_is_exceeded_by_little_and_not_much_too_large(predicted_mib, measured_mib, wanted):
    assert real_sizes._memory_row("worker", predicted_mib, measured_mib)["ok"] == wanted
