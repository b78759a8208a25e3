"""Which ids end an own answer, from the configuration files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.alignment.tokenizer_file import TokenizerFile
from mrl.errors import ModelFolderError


def find_eos(folder: Path, file: TokenizerFile) -> tuple[int, ...]:
    """EOS ids, the preferred one first: that of the tokenizer's configuration where it is among several.

    Raises ModelFolderError where none is declared.
    """
    named = _named_eos(_optional_json(folder / "tokenizer_config.json"), file)
    for name in ("generation_config.json", "config.json"):
        found = _optional_json(folder / name).get("eos_token_id")
        ids = [found] if isinstance(found, int) else [i for i in found or [] if isinstance(i, int)]
        if ids:
            return tuple(sorted(ids, key=lambda token_id: token_id != named))
    if named is None:
        wanted = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
        raise ModelFolderError("no EOS token is declared", where=str(folder), wanted=wanted)
    return (named,)


def _named_eos(config: Mapping[str, Any], file: TokenizerFile) -> int | None:
    eos = config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    added = {token["content"]: int(token["id"]) for token in file.added_tokens}
    vocab: Mapping[str, int] = file.content["model"]["vocab"]
    return added.get(content, vocab.get(content)) if isinstance(content, str) else None


def _optional_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError("cannot read a configuration file", where=str(path), got=str(error)) from error
    return content if isinstance(content, dict) else {}
