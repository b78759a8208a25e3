"""Small real models and values that tests of several rooms share."""

import os
from collections.abc import Callable

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub but one of its own
# A busy machine is slow for longer than any time limit on one example.
settings.register_profile("mrl", deadline=None)
settings.load_profile("mrl")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., object]:
    """A factory of real, randomly initialised transformers of about 50k parameters, the same for the same seed."""

    def make(family: str = "qwen3", *, seed: int = 0, vocab_size: int = 64, tied: bool = True) -> object:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "tie_word_embeddings": tied,
            "initializer_range": 0.3,
        }
        if family == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()

    return make
