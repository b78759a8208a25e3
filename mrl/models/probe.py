"""A small policy with random weights, to test an engine with."""

from pathlib import Path

import torch
from transformers.utils import logging

from mrl.config.policy_tables import MakeTable
from mrl.models.architectures import init_model
from mrl.models.tokenizers import train_byte_level

VOCAB_SIZE = 400
RECIPE = MakeTable(
    architecture="qwen3", tokenizer="byte_level", vocab_size=VOCAB_SIZE, hidden_size=64, num_layers=2, num_heads=2
)
TEXT = "What is one and two? <answer>three</answer> The quick brown fox jumps over the lazy dog 0123456789."


def save_probe(folder: Path, *, seed: int) -> None:
    """Save the policy of a seed into `folder`, as a Hugging Face folder whose weights are larger than usual.

    With usual initial weights all tokens are about equally likely, and much that is wrong would look right.
    """
    logging.disable_progress_bar()
    tokenizer = train_byte_level([TEXT] * 3, VOCAB_SIZE)
    recipe = RECIPE.model_copy(update={"seed": seed})
    model = init_model(recipe, vocab_size=VOCAB_SIZE, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
