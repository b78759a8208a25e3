"""Folders that pass for Hugging Face models at a glance: a small tokenizer, and weights that nobody reads."""

import json
from pathlib import Path

from mrl.models.tokenizers import train_byte_level


def write_model(folder: Path) -> Path:
    """Make the folder; returns it."""
    train_byte_level(["answer yah one two three"], 300).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def unlist_end(folder: Path) -> None:
    """Take the token that ends an answer out of the vocabulary; among the added tokens it keeps its id, 0."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["model"]["vocab"].pop("<|endoftext|>") == 0
    path.write_text(json.dumps(content))
