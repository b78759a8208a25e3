#!/usr/bin/env python3
"""Model folders with the tokenizers of known families, for tests and tools, made from files of other Python packages.

    .venv/bin/python tools/real_vocabularies.py FOLDER [NAME ...]

qwen         byte-level BPE with NFC, single digits        dashscope
tekken       byte-level BPE, single digits                 mistral_common
mistral_spm  metaspace BPE, byte fallback, dummy prefix    mistral_common
llama3       byte-level BPE, digits in threes              llama_models, where it is installed
llama4       byte-level BPE, digits in threes              llama_models, where it is installed

Normalizers, pre-tokenizers and decoders are those that transformers gives to these families. A folder holds a
tokenizer.json and the EOS, no weights. Making one takes some seconds; a folder that exists is taken as it is.
"""

import base64
import contextlib
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA4 = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS: tuple[str, ...] = ("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_{n}|>" for n in range(4)))
LLAMA3_SPECIALS += ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>")
LLAMA4_SPECIALS: tuple[str, ...] = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
)
LLAMA4_SPECIALS += ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>")
METASPACE = "\u2581"

Ranks = dict[bytes, int]


class ByteLevel(NamedTuple):
    """Parts of a byte-level family's tokenizer. Special tokens have their released ids, `added` ones follow them."""

    package: str
    file: str
    pattern: str
    specials: tuple[str, ...]
    eos: str
    added: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = True
    specials_first: bool = False


BYTE_LEVEL = {
    "qwen": ByteLevel(
        "dashscope",
        "resources/qwen.tiktoken",
        QWEN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        nfc=True,
        ignore_merges=False,
    ),
    "llama3": ByteLevel("llama_models", "llama3/tokenizer.model", LLAMA3, LLAMA3_SPECIALS, "<|eot_id|>"),
    "llama4": ByteLevel("llama_models", "llama4/tokenizer.model", LLAMA4, LLAMA4_SPECIALS, "<|eot|>"),
    "tekken": ByteLevel(
        "mistral_common", "data/tekken_240911.json", "", ("<unk>", "<s>", "</s>"), "</s>", specials_first=True
    ),
}
MISTRAL_SPM = ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3")
NAMES = (*BYTE_LEVEL, "mistral_spm")


def carried_file(package: str, file: str) -> Path | None:
    """Return a file that an installed package carries, without importing the package; None if there is none."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    found = [path for place in places or () if (path := Path(place) / file).is_file()]
    return found[0] if found else None


def source_file(name: str) -> Path | None:
    """Return the file of one vocabulary; None if its package is not installed."""
    return carried_file(*(MISTRAL_SPM if name == "mistral_spm" else BYTE_LEVEL[name][:2]))


def read_ranks(name: str) -> tuple[Ranks, str, int]:
    """Return (bytes -> rank, split pattern, id of rank 0) of a byte-level vocabulary."""
    path, family = source_file(name), BYTE_LEVEL[name]
    assert path is not None, f"{family.package} is not installed"
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        num_specials = int(config["default_num_special_tokens"])
        entries = content["vocab"][: int(config["default_vocab_size"]) - num_specials]
        return {base64.b64decode(e["token_bytes"]): int(e["rank"]) for e in entries}, config["pattern"], num_specials
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}, family.pattern, 0


def make_folder(name: str, root: Path) -> Path:
    """Return the model folder `root/name`, made if it is missing."""
    folder = root / name
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    content, eos = _spm() if name == "mistral_spm" else _byte_level(name)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        making = Path(scratch) / name
        making.mkdir()
        (making / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (making / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        with contextlib.suppress(OSError):  # another process was faster
            making.rename(folder)
    return folder


def available() -> list[str]:
    """Names of the vocabularies whose packages are installed."""
    return [name for name in NAMES if source_file(name) is not None]


def _byte_level(name: str) -> tuple[dict[str, Any], int]:
    family = BYTE_LEVEL[name]
    ranks, pattern, shift = read_ranks(name)
    characters = _characters()

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    halves = _every_split if family.ignore_merges else _last_merge
    merges = [
        [spell(one), spell(other)]
        for token in sorted(ranks, key=ranks.__getitem__)
        for one, other in halves(ranks, token)
    ]
    vocab = {spell(token): rank + shift for token, rank in ranks.items()}
    first = 0 if family.specials_first else len(ranks)
    names = [*family.specials, *family.added]
    added = [_added(first + n, text, special=text in family.specials) for n, text in enumerate(names)]
    if family.specials_first:  # ids below those of the vocabulary count only if the vocabulary has them, too
        vocab |= {text: n for n, text in enumerate(names)}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    plain = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if family.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", **plain}]},
        "decoder": {"type": "ByteLevel", **plain},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": family.ignore_merges},
    }, first + names.index(family.eos)


def _every_split(ranks: Mapping[bytes, int], token: bytes) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that join into this one, as transformers lists them where it reads a rank file."""
    cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
    return sorted((c for c in cuts if c[0] in ranks and c[1] in ranks), key=lambda c: (ranks[c[0]], ranks[c[1]]))


def _last_merge(ranks: Mapping[bytes, int], token: bytes) -> list[tuple[bytes, bytes]]:
    """Return the merge that makes this token of the parts that merges of lower rank leave of it; [] without one."""
    limit, parts = ranks[token], [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, limit), at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
        lowest, at = min(pairs)
        if lowest >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [(parts[0], parts[1])] if len(parts) == 2 else []


def _spm() -> tuple[dict[str, Any], int]:
    path = source_file("mistral_spm")
    assert path is not None, "mistral_common is not installed"
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    scores = {piece: model.get_score(index) for index, piece in enumerate(pieces)}
    plain = [p for i, p in enumerate(pieces) if not (model.is_byte(i) or model.is_control(i) or model.is_unknown(i))]
    merges = []
    for piece in plain:
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = sorted((c for c in cuts if c[0] in vocab and c[1] in vocab), key=lambda c: (vocab[c[0]], vocab[c[1]]))
        merges += [(scores[piece], cut) for cut in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    specials = [_added(i, p, special=True) for i, p in enumerate(pieces) if model.is_control(i) or model.is_unknown(i)]
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    prefix = {"type": "Prepend", "prepend": METASPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    return {
        "version": "1.0",
        "added_tokens": specials,
        "normalizer": {"type": "Sequence", "normalizers": [prefix, replace]},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [list(cut) for _, cut in merges],
        },
    }, model.eos_id()


def _added(index: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, "special": special, **plain}


def _characters() -> dict[int, str]:
    """GPT-2's map of bytes: printable Latin-1 bytes are themselves, the other 68 follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def main(words: list[str]) -> int:
    root, *names = words
    for name in names or available():
        print(make_folder(name, Path(root)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
