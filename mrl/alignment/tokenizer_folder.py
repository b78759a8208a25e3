"""The tokenizer of a model folder, whatever file carries it.

In this order: `tokenizer.json`; `tekken.json` (Mistral); a tiktoken rank file (`*.tiktoken`, `tiktoken.model`, or
`tokenizer.model` where that is one). A rank file of no known family needs a `tokenizer_config.json` beside it with

    pat_str                the regular expression that splits text, under the name that tiktoken gives it
    added_tokens_decoder   id -> {"content": ..., "special": ...}, as transformers writes it
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.rank_table import family_of, read_tekken, read_tiktoken_ranks
from mrl.alignment.tokenizer_file import TOKENIZER_FILE, TokenizerFile, optional_json, read_tokenizer_file
from mrl.errors import ModelFolderError

RANK_FILES = ("*.tiktoken", "tiktoken.model", "tokenizer.model")
DECLARING = ("generation_config.json", "config.json", "params.json")


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


def find_eos(folder: Path, file: TokenizerFile) -> tuple[int, ...]:
    """EOS ids, the preferred one first: that of the tokenizer's configuration where it is among several.

    What the folder declares goes before what the tokenizer's own file says (tekken, known rank files). Raises
    ModelFolderError where neither declares one, and for an id that the tokenizer does not have.
    """
    named = _named_eos(optional_json(folder / "tokenizer_config.json"), file)
    for name in DECLARING:
        ids = _ids(optional_json(folder / name).get("eos_token_id"))
        if ids:
            return _known(tuple(sorted(ids, key=lambda token_id: token_id != named)), file, folder / name)
    found = file.eos_ids if named is None else (named,)
    if not found:
        wanted = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
        raise ModelFolderError("no EOS token is declared", where=str(folder), wanted=wanted)
    return found


def _ids(declared: Any) -> list[int]:
    return [index for index in (declared if isinstance(declared, list) else [declared]) if type(index) is int]


def _known(ids: tuple[int, ...], file: TokenizerFile, path: Path) -> tuple[int, ...]:
    known = {int(token["id"]) for token in file.added_tokens} | set(file.content["model"]["vocab"].values())
    unknown = [index for index in ids if index not in known]
    if unknown:
        raise ModelFolderError(
            "the EOS is no token of the tokenizer", where=str(path), got=unknown[0], wanted=f"an id of {file.path}"
        )
    return ids


def _named_eos(config: Mapping[str, Any], file: TokenizerFile) -> int | None:
    eos = config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(token["id"]) for token in file.added_tokens}
    vocab: Mapping[str, int] = file.content["model"]["vocab"]
    return added.get(content, vocab.get(content)) if isinstance(content, str) else None
