"""The tokenizer of a model folder, and the ids that end an answer."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.tokenizer_file import TOKENIZER_FILE, TokenizerFile, optional_json, read_tokenizer_file
from mrl.errors import ModelFolderError

DECLARING = ("generation_config.json", "config.json", "params.json")


def read_tokenizer(path: Path) -> TokenizerFile:
    """Read the tokenizer of a model folder, or of its `tokenizer.json`.

    Raises ModelFolderError where there is none or it is malformed, and TokenizerRefused for a kind whose bytes cannot
    be known exactly.
    """
    folder = path.parent if path.name == TOKENIZER_FILE else path
    if not folder.is_dir():
        raise ModelFolderError(
            "not a folder" if folder.exists() else "no such folder",
            where=str(folder),
            wanted="a model folder, or its tokenizer.json",
            cure="give the path of a folder; `hf download NAME --local-dir FOLDER` makes one from a model of the hub",
        )
    if not (folder / TOKENIZER_FILE).is_file():
        raise ModelFolderError(
            "tokenizer.json is missing",
            where=str(folder),
            wanted="a Hugging Face model folder",
            cure=saving_command(folder),
        )
    return read_tokenizer_file(folder)


def saving_command(folder: Path) -> str:
    """Return a shell command that writes a tokenizer.json, from older files in the folder or from the model that it was
    trained from.
    """
    older = any((folder / name).is_file() for name in ("vocab.json", "tokenizer.model", "spiece.model", "vocab.txt"))
    origin = str(folder) if older else "THE BASE MODEL"
    return (
        f'python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{origin}').save_pretrained('{folder}')\""
    )


def find_eos(folder: Path, file: TokenizerFile, closing: str = "") -> tuple[int, ...]:
    """Return the EOS ids, first the one that closes an answer.

    Of several, the one that comes first in `closing`, the chat template's text behind an answer, closes answers; else
    that of the tokenizer's configuration. Raises ModelFolderError where the folder declares none, and for an id that
    the tokenizer does not have.
    """
    named = _named_eos(optional_json(folder / "tokenizer_config.json"), file)
    for name in DECLARING:
        ids = _ids(optional_json(folder / name).get("eos_token_id"))
        if ids:
            closes = _first_in(closing, ids, file, named)
            return _known(tuple(sorted(ids, key=lambda token_id: token_id != closes)), file, folder / name)
    if named is None:
        wanted = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
        raise ModelFolderError("no EOS token is declared", where=str(folder), wanted=wanted)
    return (named,)


def _first_in(closing: str, ids: Collection[int], file: TokenizerFile, named: int | None) -> int | None:
    """Return the id whose token comes first in `closing`, else `named`, which for Gemma is `<eos>` and ends no turn."""
    places = {int(token["id"]): closing.find(token["content"]) for token in file.added_tokens}
    return min((index for index in ids if places.get(index, -1) >= 0), key=places.__getitem__, default=named)


def _ids(declared: Any) -> list[int]:
    return [index for index in (declared if isinstance(declared, list) else [declared]) if type(index) is int]


def _known(ids: tuple[int, ...], file: TokenizerFile, path: Path) -> tuple[int, ...]:
    known = {int(token["id"]) for token in file.added_tokens} | set(file.content["model"]["vocab"].values())
    unknown = [index for index in ids if index not in known]
    if unknown:
        raise ModelFolderError(
            "the EOS id is not an id of the tokenizer", where=str(path), got=unknown[0], wanted=f"an id of {file.path}"
        )
    return ids


def _named_eos(config: Mapping[str, Any], file: TokenizerFile) -> int | None:
    eos = config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(token["id"]) for token in file.added_tokens}
    vocab: Mapping[str, int] = file.content["model"]["vocab"]
    return added.get(content, vocab.get(content)) if isinstance(content, str) else None
