"""Raw rank files, written as the `tokenizer.json` that says the same: tiktoken's `base64 rank` lines and `tekken.json`.

A rank file is the same tokenizer as a byte-level `tokenizer.json` that lists every way to join two pieces into a third,
lowest rank first, and takes a pre-token that is a piece as it is. Written so, it is read like any other: `tokenizers`
defines the ids, tiktoken gives the same ones faster where it is installed.

A tiktoken rank file holds pieces and ranks, nothing else. The same ranks under another regular expression are another
tokenizer, so none is guessed: a file is one of the families whose digests are known here, or the model folder says in
`tokenizer_config.json` what the file leaves open.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.alignment.byte_table import byte_piece
from mrl.alignment.tokenizer_file import TokenizerFile
from mrl.errors import ModelFolderError

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
TEKKEN_SPECIALS = ("<unk>", "<s>", "</s>")
"""The first special tokens of tekken files that do not list theirs."""
TEKKEN_EOS = "</s>"
NONE: Mapping[str, int] = {}


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


def read_tiktoken_ranks(
    path: Path,
    *,
    pattern: str,
    special_tokens: Mapping[str, int],
    plain_tokens: Mapping[str, int] = NONE,
    eos_tokens: Sequence[str] = (),
    nfc: bool = False,
) -> TokenizerFile:
    """The tokenizer of a tiktoken rank file, which says neither how it splits text nor which special tokens it has.

    `plain_tokens` are added tokens that stand for their own text, as `<think>` in Qwen 3.
    Raises ModelFolderError for a malformed file, ids that are taken twice, or EOS tokens that are not special ones.
    """
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelFolderError("cannot read the rank file", where=str(path), got=str(error)) from error
    content = file_content(ranks, pattern, special_tokens, plain_tokens, nfc=nfc)
    return _as_file(path, content, special_tokens, eos_tokens)


def read_tekken(path: Path, *, eos: str | None = None) -> TokenizerFile:
    """The tokenizer of a `tekken.json`: special tokens take the first ids, ranks follow.

    Its EOS is `eos`, or else `</s>` where that is among the special tokens. Raises ModelFolderError for a malformed
    file, ids that are taken twice, or an `eos` that is no special token.
    """
    try:
        tekken = json.loads(path.read_text(encoding="utf-8"))
        config = tekken["config"]
        num_specials = int(config["default_num_special_tokens"])
        entries = tekken["vocab"][: int(config["default_vocab_size"]) - num_specials]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) + num_specials for entry in entries}
        specials, pattern = _tekken_specials(tekken, num_specials), str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError("cannot read the tekken file", where=str(path), got=str(error)) from error
    known = [TEKKEN_EOS] if TEKKEN_EOS in specials else []
    return _as_file(path, file_content(ranks, pattern, specials), specials, known if eos is None else [eos])


def _tekken_specials(tekken: Mapping[str, Any], num_specials: int) -> dict[str, int]:
    """Name -> id of every special token; those without a name get one."""
    listed = {int(token["rank"]): str(token["token_str"]) for token in tekken.get("special_tokens") or ()}
    names = listed or dict(enumerate(TEKKEN_SPECIALS))
    return {names.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(num_specials)}


def _as_file(
    path: Path, content: Mapping[str, Any], specials: Mapping[str, int], eos_tokens: Sequence[str]
) -> TokenizerFile:
    unknown = [name for name in eos_tokens if name not in specials]
    if unknown:
        raise ModelFolderError("the EOS is no special token", where=str(path), got=unknown[0])
    pieces = content["model"]["vocab"].values()
    if len({*pieces, *specials.values()}) < len(pieces) + len(specials):
        raise ModelFolderError("two tokens have one id", where=str(path), wanted="an id of its own for every token")
    eos_ids = tuple(specials[name] for name in eos_tokens)
    return TokenizerFile(path, content, "byte_level", has_dummy_prefix=False, eos_ids=eos_ids)


def file_content(
    ranks: Mapping[bytes, int],
    pattern: str,
    special_tokens: Mapping[str, int],
    plain_tokens: Mapping[str, int] = NONE,
    *,
    nfc: bool = False,
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
    literal = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": name, "special": name in special_tokens} | literal
            for name, index in (*special_tokens.items(), *plain_tokens.items())
        ],
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
            # Among the pieces, since `tokenizers` numbers added tokens anew where they are not.
            "vocab": {names[data]: rank for data, rank in ranks.items()} | dict(plain_tokens),
            "merges": merges,
        },
    }
