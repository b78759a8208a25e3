"""Small models of several families, with random weights."""

from collections.abc import Callable

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mrl.config.policy_tables import MakeTable

EXPERTS, EXPERTS_PER_TOKEN = 8, 2
"""Experts of a layer of a mixture, and experts that one token uses. An expert's MLP is as wide as the hidden states."""
ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3": lambda **shape: Qwen3ForCausalLM(Qwen3Config(**shape)),
    "llama": lambda **shape: LlamaForCausalLM(LlamaConfig(**shape)),
    "gemma3": lambda **shape: Gemma3ForCausalLM(
        Gemma3TextConfig(**shape, sliding_window=shape["max_position_embeddings"])
    ),
    "qwen3_moe": lambda **shape: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shape,
            num_experts=EXPERTS,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            moe_intermediate_size=shape["intermediate_size"] // MLP_FACTOR,
        )
    ),
}
"""Name -> constructor from keys of the model's configuration. All of them tie the head to the embedding."""

MAX_POSITIONS = 512
MLP_FACTOR = 3


def init_model(recipe: MakeTable, *, vocab_size: int, eos_id: int, pad_id: int) -> PreTrainedModel:
    """Make a model with random weights; they depend on the arguments alone, and torch's global generator stays as it
    was.
    """
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": MLP_FACTOR * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_cached_heads,
        "head_dim": recipe.hidden_size // recipe.num_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return ARCHITECTURES[recipe.architecture](**shape)
