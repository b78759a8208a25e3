"""Raw rank files: tiktoken's `base64 rank` lines and Mistral's `tekken.json`.

A rank file is the same tokenizer as a byte-level `tokenizer.json` that lists every way to join two pieces into a third,
lowest rank first, and takes a pre-token that is a piece as it is. Written so, it is read like any other: `tokenizers`
defines the ids, tiktoken gives the same ones faster where it is installed.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.byte_table import byte_piece
from mrl.alignment.receiver import Receiver, prove
from mrl.alignment.tokenizer_file import TokenizerFile
from mrl.errors import ModelFolderError

PATTERNS = {
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Regular expressions of families whose rank files do not carry theirs."""
TEKKEN_SPECIALS = ("<unk>", "<s>", "</s>")


def load_tiktoken_ranks(
    path: Path,
    *,
    pattern: str,
    special_tokens: Mapping[str, int],
    eos: str | None = None,
    nfc: bool = False,
    use_tiktoken: bool = True,
) -> Receiver:
    """A receiver from a tiktoken rank file; `pattern` is a regular expression or a name in `PATTERNS`.

    `nfc` says that the family puts text into NFC first (Qwen). Raises ModelFolderError for a malformed file, an `eos`
    that is not among the special tokens, or ranks that do not reproduce the probe texts.
    """
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelFolderError("cannot read the rank file", where=str(path), got=str(error)) from error
    content = file_content(ranks, PATTERNS.get(pattern, pattern), special_tokens, nfc=nfc)
    return _receiver(path, content, special_tokens, eos, use_tiktoken=use_tiktoken)


def load_tekken(path: Path, *, eos: str = "</s>", use_tiktoken: bool = True) -> Receiver:
    """A receiver from a `tekken.json`; special tokens take the first ids, ranks follow.

    Raises ModelFolderError for a malformed file or one that does not reproduce the probe texts.
    """
    try:
        tekken = json.loads(path.read_text(encoding="utf-8"))
        config = tekken["config"]
        num_specials = int(config["default_num_special_tokens"])
        num_ranks = int(config["default_vocab_size"]) - num_specials
        listed = tekken.get("special_tokens") or [
            {"token_str": name, "rank": rank} for rank, name in enumerate(TEKKEN_SPECIALS)
        ]
        specials = {f"<SPECIAL_{rank}>": rank for rank in range(num_specials)}
        named = {int(token["rank"]): str(token["token_str"]) for token in listed}
        specials = {named.get(rank, name): rank for name, rank in specials.items()}
        entries = tekken["vocab"][:num_ranks]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + num_specials for entry in entries}
        content = file_content(ranks, str(config["pattern"]), specials)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError("cannot read the tekken file", where=str(path), got=str(error)) from error
    return _receiver(path, content, specials, eos, use_tiktoken=use_tiktoken)


def file_content(
    ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int], *, nfc: bool = False
) -> dict[str, Any]:
    """The content of the `tokenizer.json` that says the same as these ranks."""
    names = {data: byte_piece(data) for data in ranks}
    merges: list[tuple[str, str]] = []
    for data in sorted(ranks, key=ranks.__getitem__):
        splits = [(data[:at], data[at:]) for at in range(1, len(data))]
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in known]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": name} | plain for name, index in special_tokens.items()],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "post_processor": None,
        "decoder": to_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {names[data]: rank for data, rank in ranks.items()},
            "merges": merges,
        },
    }


def _receiver(
    path: Path, content: dict[str, Any], specials: Mapping[str, int], eos: str | None, *, use_tiktoken: bool
) -> Receiver:
    if eos is not None and eos not in specials:
        raise ModelFolderError("the EOS is no special token", where=str(path), got=eos)
    file = TokenizerFile(path, content, "byte_level", has_dummy_prefix=False)
    eos_ids = () if eos is None else (specials[eos],)
    return prove(Receiver(file, eos_ids=eos_ids, use_tiktoken=use_tiktoken), path)
