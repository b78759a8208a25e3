"""Models with random weights in the shapes of released ones, made on the device that they are for."""

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

COMMON = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
RELEASED: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Shapes of Qwen3 models."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def config_of(shape: str, **changes: Any) -> Qwen3Config:
    """Make the configuration of a released shape, or of "tiny"."""
    keys = COMMON | {"tie_word_embeddings": True} | (TINY if shape == "tiny" else RELEASED[shape]) | changes
    return Qwen3Config(**keys, eos_token_id=1, pad_token_id=0, bos_token_id=None)


def random_model(config: Qwen3Config, device: str) -> PreTrainedModel:
    """Make a model with random weights in float32; matrices about keep the length of vectors, as trained ones do."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.eval()
