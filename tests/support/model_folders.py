"""Folders that pass for Hugging Face models at a glance: a small tokenizer, and weights that nobody reads."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mrl.models.tokenizers import train_byte_level


def write_model(folder: Path) -> Path:
    """Make the folder and return it."""
    train_byte_level(["answer yah one two three"], 300).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    write_weights(folder / "model.safetensors", num_elements=200)
    return folder


def write_byte_level(
    folder: Path,
    corpus: Sequence[str],
    size: int,
    *,
    eos: str = "</s>",
    normalizer: normalizers.Normalizer | None = None,
) -> Path:
    """Make a folder with a byte-level tokenizer of `size` tokens that is trained on `corpus`; return the folder."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[eos], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def write_weights(file: Path, *, num_elements: int, held_bytes: int | None = None) -> None:
    """Write a safetensors file with one tensor in float16, cut to `held_bytes` of data if given; it takes no room."""
    size = 2 * num_elements
    header = json.dumps({"x": {"dtype": "F16", "shape": [num_elements], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (size if held_bytes is None else held_bytes))


def unlist_end(folder: Path) -> None:
    """Remove the token that ends an answer from the vocabulary; as an added token it keeps its id, 0."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    assert content["model"]["vocab"].pop("<|endoftext|>") == 0
    path.write_text(json.dumps(content))
