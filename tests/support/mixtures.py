"""Small random mixtures of experts, and rows with random experts, which no router chose."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mrl.sharing.regime import TrainingExample

NUM_LAYERS, TOP_K, NUM_EXPERTS, VOCAB_SIZE = 3, 2, 6, 64
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "num_experts_per_tok": TOP_K,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def make_mixture(family: str = "qwen3_moe", *, seed: int = 1, **config: object) -> PreTrainedModel:
    """Make a random mixture. Qwen's second layer is dense; Mixtral has no dense layer."""
    torch.manual_seed(seed)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=NUM_EXPERTS, **config)).eval()
    told = {"moe_intermediate_size": 16, "num_experts": NUM_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | told | config)).eval()


def draw_experts(rng: np.random.Generator, num_rows: int, num_layers: int = NUM_LAYERS) -> np.ndarray:
    """Draw [R, X] experts that are distinct within a layer, in no order."""
    drawn = rng.random((num_rows, num_layers, NUM_EXPERTS)).argsort(-1)[:, :, :TOP_K]
    return drawn.reshape(num_rows, num_layers * TOP_K).astype(np.uint8)


def with_drawn_experts(rows: Sequence[TrainingExample], seed: int = 4) -> list[TrainingExample]:
    """Give own rows experts for their sampled tokens and, for some, their prompts; rows of peers get none."""
    rng, found, of_prompts = np.random.default_rng(seed), [], dict[bytes, np.ndarray]()
    for row in rows:
        prompt = row.prompt_token_ids
        before = None
        if prompt.size > 1 and prompt[0] % 3:
            before = of_prompts.setdefault(prompt.tobytes(), draw_experts(rng, prompt.size - 1))
        experts = draw_experts(rng, row.num_trained_tokens)
        found.append(replace(row, experts=experts, prompt_experts=before) if row.component == "own" else row)
    return found
