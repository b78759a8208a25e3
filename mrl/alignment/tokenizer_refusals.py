"""Reasons, in words, why a tokenizer cannot be aligned exactly, from its file alone."""

from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN = "a {} that it does not know becomes one <unk>, whose bytes are lost"
MODELS = {
    "WordPiece": f"its pieces do not say where spaces stood, and {UNKNOWN.format('word')}",
    "WordLevel": UNKNOWN.format("word"),
    "Unigram": f"without byte fallback {UNKNOWN.format('character')}",
}
"""Type of a model -> what is lost under it; the entry of Unigram is for models without byte fallback."""
UNIGRAM_WITH_BYTES = "a Unigram model emits a special token wherever a plain text spells one"
NO_BYTES = f"its decoder is not byte-level, and without byte fallback {UNKNOWN.format('character')}"
NO_DECODER = "its decoder does not say which bytes a piece stands for"
NORMALIZERS = {
    "NFKC": "rewrites characters such as \ufb01, \u00bd and the no-break space",
    "NFKD": "rewrites characters such as \ufb01, \u00bd and \u00e9",
    "NFD": "takes characters such as \u00e9 apart",
    "Nmt": "makes line breaks and tabs into spaces",
    "Lowercase": "loses case",
    "StripAccents": "loses accents",
    "BertNormalizer": "loses case, accents and control characters",
    "Strip": "loses spaces at the ends of a text",
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
        return "it holds no model of a known kind"
    return NO_DECODER if falls_back else NO_BYTES


def text_fault(normalizers: Iterator[Mapping[str, Any]], num_byte_pieces: int) -> str:
    """Return why a tokenizer of a supported kind does not reproduce a text; empty where its file does not show a
    reason.
    """
    if num_byte_pieces < 256:
        return f"{256 - num_byte_pieces} of the 256 bytes have no piece of their own"
    lossy = [str(step.get("type")) for step in normalizers if step.get("type") in NORMALIZERS]
    return " and ".join(f"its normalizer {name} {NORMALIZERS[name]}" for name in lossy)
