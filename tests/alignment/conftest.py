"""Small tokenizers trained on the spot, saved as Hugging Face folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "reverse: yah sun nus hay lamp pmal",
    "12 + 34 = 46 and  two spaces\nnew line\n\tdef f(x): return x",
    "caf\u00e9 na\u00efve \u6f22\u5b57 \U0001f469",
] * 20


def byte_level(normalizer: normalizers.Normalizer | None = None, *, prefix_space: bool = False) -> Tokenizer:
    """Qwen-like: byte-level BPE, optionally with NFC, or with a real leading space as RoBERTa has."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<th\u00efnk>", special=False, normalized=False)])
    return tokenizer


def metaspace(prefix: str = "none", *, num_bytes: int = 256) -> Tokenizer:
    """Gemma-like (prefix "none") or Llama-like ("prepend", "first", "always"): metaspace BPE with byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    elif prefix in ("first", "always"):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps if prefix == "none" else [*steps, decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(num_bytes))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, limit_alphabet=80, show_progress=False)
    tokenizer.train_from_iterator([" ".join(text.split(" ")) for text in CORPUS], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, eos: str = "") -> Path:
    """Write the folder that `load_receiver` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos_token = eos or ("</s>" if tokenizer.token_to_id("</s>") is not None else "<|im_end|>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(eos_token)}))
    return folder


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_nfc": lambda: byte_level(normalizers.NFC()),
    "byte_level_prefix_space": lambda: byte_level(prefix_space=True),
    "metaspace": metaspace,
    "metaspace_prepend": lambda: metaspace("prepend"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
}


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    """One trained tokenizer per supported kind."""
    return {kind: make() for kind, make in KINDS.items()}


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizers_by_kind) -> dict[str, Path]:
    """A model folder per supported kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: save(tokenizer, root / kind) for kind, tokenizer in tokenizers_by_kind.items()}


@pytest.fixture
def save_folder(tmp_path) -> Callable[..., Path]:
    """Saves a tokenizer into a fresh folder."""
    return lambda tokenizer, **how: save(tokenizer, tmp_path / "model", **how)


@pytest.fixture
def make_metaspace() -> Callable[..., Tokenizer]:
    """`metaspace`."""
    return metaspace
