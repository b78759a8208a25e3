"""Families whose rank files are known by their digest: how they split text, their special tokens, what ends an answer.

A tiktoken rank file holds pieces and ranks, nothing else. The same ranks under another regular expression are another
tokenizer, so none is guessed: a file is either one of these, or the model folder says in `tokenizer_config.json` what
the file leaves open.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
)
PATTERNS = {
    "qwen": rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "llama3": rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "llama4": rf"{CASED_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
}
"""Regular expressions of families whose rank files do not carry theirs."""


@dataclass(frozen=True, slots=True)
class RankFamily:
    """What a rank file of one family leaves open. Special tokens take the ids behind the ranks."""

    pattern: str
    num_ranks: int
    specials: Mapping[int, str]
    """Place behind the ranks -> name; places without a name are reserved."""
    num_specials: int
    eos_tokens: tuple[str, ...]
    """The one that ends a turn first."""
    nfc: bool = False

    @property
    def special_tokens(self) -> dict[str, int]:
        """Name -> id."""
        names = (self.specials.get(place, f"<|reserved_{place}|>") for place in range(self.num_specials))
        return {name: self.num_ranks + place for place, name in enumerate(names)}


FAMILIES: dict[str, RankFamily] = {
    # Qwen 1, `qwen.tiktoken` (package dashscope 2.0.2, tokenizers/qwen_tokenizer.py)
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": RankFamily(
        PATTERNS["qwen"],
        151_643,
        {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"},
        208,
        ("<|im_end|>", "<|endoftext|>"),
        nfc=True,
    ),
    # Llama 3.x, `tokenizer.model` (package llama-models 0.3.0, llama3/tokenizer.py)
    "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55": RankFamily(
        PATTERNS["llama3"],
        128_000,
        {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"}
        | {8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"},
        256,
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    ),
    # Llama 4, `tokenizer.model` (package llama-models 0.3.0, llama4/tokenizer.py)
    "d0bdbaf59b0762c8c807617e2d8ea51420eb1b1de266df2495be755c8e0ed6ed": RankFamily(
        PATTERNS["llama4"],
        200_000,
        {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 5: "<|header_start|>", 6: "<|header_end|>"}
        | {7: "<|eom|>", 8: "<|eot|>"},
        2048,
        ("<|eot|>", "<|end_of_text|>", "<|eom|>"),
    ),
}
"""SHA-256 of the rank file -> family."""


def family_of(path: Path) -> RankFamily | None:
    """The family that this very file belongs to, or None."""
    return FAMILIES.get(hashlib.sha256(path.read_bytes()).hexdigest())
