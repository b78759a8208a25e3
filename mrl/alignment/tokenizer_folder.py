"""The tokenizer of a model folder, whatever file carries it.

In this order: `tokenizer.json`; `tekken.json` (Mistral); a tiktoken rank file (`*.tiktoken`, `tiktoken.model`, or
`tokenizer.model` where that is one). A rank file of no known family needs a `tokenizer_config.json` beside it with

    pat_str                the regular expression that splits text, under the name that tiktoken gives it
    added_tokens_decoder   id -> {"content": ..., "special": ...}, as transformers writes it
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.rank_families import family_of
from mrl.alignment.rank_table import read_tekken, read_tiktoken_ranks
from mrl.alignment.tokenizer_file import TOKENIZER_FILE, TokenizerFile, optional_json, read_tokenizer_file
from mrl.errors import ModelFolderError

RANK_FILES = ("*.tiktoken", "tiktoken.model", "tokenizer.model")


def read_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer of a model folder, or of one such file.

    Raises ModelFolderError where there is none, it is malformed or it leaves open how it splits text, and
    TokenizerRefused for a kind whose bytes cannot be known exactly.
    """
    file = find_tokenizer(path) if path.is_dir() else path
    if not file.is_file():
        raise ModelFolderError("no tokenizer", where=str(file), wanted="a model folder, or a tokenizer file of one")
    if file.name == TOKENIZER_FILE:
        return read_tokenizer_file(file.parent)
    return read_tekken(file) if file.suffix == ".json" else _read_ranks(file)


def find_tokenizer(folder: Path) -> Path:
    """The file that carries the folder's tokenizer. Raises ModelFolderError where there is none or it is not clear."""
    for name in (TOKENIZER_FILE, "tekken.json"):
        if (folder / name).is_file():
            return folder / name
    found = sorted({file for pattern in RANK_FILES for file in folder.glob(pattern)})
    if len(found) == 1:
        return found[0]
    raise ModelFolderError(
        "several rank files" if found else "cannot read the tokenizer",
        where=str(folder),
        got=", ".join(file.name for file in found) or "no tokenizer file",
        wanted=f"tokenizer.json, tekken.json or one of {', '.join(RANK_FILES)}",
        cure="save the tokenizer in its fast form (save_pretrained)",
    )


def _read_ranks(path: Path) -> TokenizerFile:
    if not _is_rank_file(path):
        raise ModelFolderError(
            "this file is no rank file",
            where=str(path),
            got="a SentencePiece model" if path.suffix == ".model" else "another format",
            wanted="tokenizer.json, tekken.json, or lines of base64 and rank",
            cure="save the tokenizer in its fast form (save_pretrained)",
        )
    family, settings = family_of(path), optional_json(path.parent / "tokenizer_config.json")
    if family:
        specials, ends = family.special_tokens, family.eos_tokens
        return read_tiktoken_ranks(
            path, pattern=family.pattern, special_tokens=specials, eos_tokens=ends, nfc=family.nfc
        )
    pattern = settings.get("pat_str")
    if not isinstance(pattern, str):
        raise ModelFolderError(
            "a rank file of no known family does not say how it splits text",
            where=str(path),
            wanted="its regular expression as pat_str in tokenizer_config.json beside it",
            cure="add it, or save the tokenizer in its fast form (save_pretrained)",
        )
    specials, plain = _declared_tokens(settings, path)
    return read_tiktoken_ranks(path, pattern=pattern, special_tokens=specials, plain_tokens=plain)


def _declared_tokens(settings: Mapping[str, Any], path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Name -> id of the added tokens that are special, and of those that stand for their own text."""
    specials: dict[str, int] = {}
    plain: dict[str, int] = {}
    try:
        for index, token in (settings.get("added_tokens_decoder") or {}).items():
            (specials if token.get("special") else plain)[str(token["content"])] = int(index)
        return specials, plain
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = str(path.parent / "tokenizer_config.json")
        raise ModelFolderError("added_tokens_decoder cannot be read", where=where, got=str(error)) from error


def _is_rank_file(path: Path) -> bool:
    with path.open("rb") as stream:
        first = stream.readline(4096).split()
    return len(first) == 2 and first[1].isdigit()
