"""Which ids end an own answer, from the configuration files of a model folder or from the tokenizer's own file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.tokenizer_file import TokenizerFile, optional_json
from mrl.errors import ModelFolderError

DECLARING = ("generation_config.json", "config.json", "params.json")


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
