"""Trained policies of many families: a small random policy of each, trained by the learner and published."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mrl.config.policy_tables import LearnerTable
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer, check_forward
from mrl.models.load_policy import load_policy
from mrl.models.parameters import adapter_sources, named_weights, released, weight_sources
from mrl.objectives.specs import Clipped
from mrl.records.version import Version
from mrl.sharing.regime import Component, TrainingExample
from mrl.weights.adapters import AdapterFormat
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.publish import Publisher
from tests.support.engine_rig import EOS_IDS, VOCAB_SIZE, save_word_tokenizer

WINDOW = 8
"""Sliding window in tokens, shorter than a canary, so that an engine that sees further is found out."""
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
        "query_pre_attn_scalar": 32,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 32},
    "phi3": {"tie_word_embeddings": False, "sliding_window": WINDOW},
    "olmo2": {"tie_word_embeddings": False},
    "olmo3": {"tie_word_embeddings": False, "sliding_window": WINDOW, "layer_types": LAYERS},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": LAYERS},
    "smollm3": {},
    "glm4": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "tie_word_embeddings": False, **EXPERTS},
    "deepseek_v3": {"tie_word_embeddings": False, **LATENT},
}
"""Model type of transformers -> keys of its configuration beyond SHAPE."""
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Mixtures of experts, which transformers holds together in memory and one by one in folders."""
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "eos_token_id": EOS_IDS[0],
    "bos_token_id": None,
    "pad_token_id": 0,
}
OWN = Component("own", Clipped(0.2, 0.2), 1.0, "rows", "own")
ROWS = 8
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class Learnt:
    """A policy that has taken some steps, as its learner published it."""

    start: Path
    """Folder that the learner began with."""
    manifest: Path
    version: Version
    model: PreTrainedModel
    """Weights that an engine has to serve: the learner's, with its adapters merged."""

    def planted(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> "Learnt":
        """Copy the adapters with changed tensors in their file, which the manifest does not know."""
        shutil.copytree(self.manifest.parent, folder)
        tensors = load_file(folder / ADAPTER_FILE)
        change(tensors)
        save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
        return replace(self, manifest=folder / self.manifest.name)


def make_family(folder: Path, family: str) -> Path:
    """Make a folder with a small random policy."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    save_word_tokenizer(folder)
    return folder


class Learner:
    """Learner of one rank that trains on random rows and publishes its weights; with `lora` its adapters alone."""

    def __init__(self, folder: Path, start: Path, **learner: Any) -> None:
        table = LearnerTable.model_validate({"lr": 1e-4} | learner)
        world = World(0, 1, torch.device("cpu"))
        self._start, self._steps = start, 0
        self._trainer = Trainer(
            load_policy(start), table, (OWN,), temperature=1.0, seed=3, total_steps=100, world=world
        )
        self._canary_ids = canary_sequences(VOCAB_SIZE)
        check_forward(self._trainer.model, self._canary_ids)
        adapters = AdapterFormat(table.lora, start) if table.lora else None
        self._publisher = Publisher(folder, "p", model_folder=start, adapters=adapters, keep=100)
        self._published = adapter_sources if adapters else weight_sources

    @property
    def model(self) -> Any:
        """Model that is trained."""
        return self._trainer.model

    def learn(self, steps: int) -> Learnt:
        """Take some steps of AdamW at a usual learning rate, then publish."""
        for step in range(self._steps, self._steps + steps):
            self._trainer.train(StepOrder(rows(step), {"own": float(ROWS)}), step)
        self._steps += steps
        model, version = self._trainer.model, Version(0, self._steps)
        canary = make_canary(model, self._canary_ids)
        weights = ((source.name, source.whole()) for source in self._published(model))
        manifest = self._publisher.publish_weights(weights, version, canary)
        served = load_policy(self._start)
        with torch.no_grad():
            own = dict(released(served, named_weights(served).items()))
            for source in weight_sources(model):
                own[source.name].copy_(source.whole())
        return Learnt(self._start, manifest, version, served)


def rows(seed: int) -> list[TrainingExample]:
    """Make training examples of random answers with random advantages."""
    rng = np.random.default_rng(seed)
    return [
        TrainingExample(
            prompt_token_ids=rng.integers(0, VOCAB_SIZE, 5).astype(np.int32),
            answer_token_ids=rng.integers(0, VOCAB_SIZE, 9).astype(np.int32),
            component="own",
            advantages=np.full(9, rng.normal(), np.float32),
            weights=np.full(9, 1.0 / 9, np.float32),
            behaviour_logprobs=-rng.exponential(3.0, 9).astype(np.float32),
            prompt_id=f"p{index}",
            source="p",
        )
        for index in range(ROWS)
    ]
