"""Reasons, in words, why a tokenizer cannot be aligned exactly, from its file alone."""

from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN = "an unknown {} becomes one <unk>, so that its bytes are lost"
MODELS = {
    "WordPiece": f"its pieces do not record spaces, and {UNKNOWN.format('word')}",
    "WordLevel": UNKNOWN.format("word"),
    "Unigram": f"without byte fallback {UNKNOWN.format('character')}",
}
"""Type of a model -> what is lost under it; the entry of Unigram is for models without byte fallback."""
UNIGRAM_WITH_BYTES = "a Unigram model emits a special token wherever a plain text spells one"
NO_BYTES = f"its decoder is not byte-level, and without byte fallback {UNKNOWN.format('character')}"
NO_DECODER = "its decoder does not define the bytes of a piece"
NORMALIZERS = {
    "NFKC": "rewrites characters such as \ufb01, \u00bd and the no-break space",
    "NFKD": "rewrites characters such as \ufb01, \u00bd and \u00e9",
    "NFD": "decomposes characters such as \u00e9",
    "Nmt": "turns line breaks and tabs into spaces",
    "Lowercase": "removes case",
    "StripAccents": "removes accents",
    "BertNormalizer": "removes case, accents and control characters",
    "Strip": "removes spaces at the ends of a text",
    "Precompiled": "rewrites characters by a table of its own",
}
"""Type of a normalizer -> what it does to a text before the text is cut into tokens."""


def model_fault(content: Mapping[str, Any]) -> str:
    """Return why pieces of this model and decoder do not stand for bytes."""
    model = content.get("model") or {}
    kind, falls_back = str(model.get("type")), bool(model.get("byte_fallback"))
    if kind == "Unigram" and falls_back:
        return UNIGRAM_WITH_BYTES
    if kind in MODELS:
        return MODELS[kind]
    if kind != "BPE":
        return "the type of its model is not supported"
    return NO_DECODER if falls_back else NO_BYTES


def text_fault(normalizers: Iterator[Mapping[str, Any]], num_byte_pieces: int) -> str:
    """Return why a tokenizer of a supported kind does not reproduce a text; empty where its file does not show a
    reason.
    """
    if num_byte_pieces < 256:
        return f"{256 - num_byte_pieces} of the 256 bytes have no token of their own"
    lossy = [str(step.get("type")) for step in normalizers if step.get("type") in NORMALIZERS]
    return " and ".join(f"its normalizer {name} {NORMALIZERS[name]}" for name in lossy)
