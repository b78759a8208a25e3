"""What the tests of all engines share: two sets of weights of one small model, and what they say to a text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_rig import EOS_IDS, VOCAB_SIZE, Weights


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Callable[[str], Weights]:
    """Weights "a" or "b" of one Qwen3 with tied heads, in folders as a learner publishes them."""
    root = tmp_path_factory.mktemp("weights")
    made: dict[str, Weights] = {}

    def of(name: str) -> Weights:
        if name not in made:
            made[name] = make_weights(root / name, seed=ord(name))
        return made[name]

    return of


def make_weights(folder: Path, *, seed: int, family: str = "qwen3", tied: bool = True) -> Weights:
    """Random weights, large enough that two seeds disagree by nats."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # the least that vLLM's attention has on a CPU
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_IDS[0],
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    kinds = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
    model, config = kinds[family]
    made = model(config(**shape)).eval()
    made.save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return Weights(folder, made)
