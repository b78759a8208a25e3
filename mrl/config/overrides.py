"""Dotted overrides of the command line: `--policies.qwen.learner.lr 1e-4` or `--run.steps=10`."""

import copy
import re
import shlex
import tomllib
from collections.abc import Sequence
from typing import Any

from mrl.config.nearest_key import annotation_at, is_named_collection, nearest, nearest_key, table_keys
from mrl.errors import ConfigError, UserError

WHERE = "command line"
"""Place of an override in error messages."""


def parse_overrides(words: Sequence[str]) -> list[tuple[tuple[str, ...], Any]]:
    """Return pairs (key path, value) in the order given. Raises ConfigError for a word that is no override."""
    pairs: list[tuple[tuple[str, ...], Any]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(
                "not a valid override", where=WHERE, got=word, wanted="--key.path VALUE", cure="see `mrl train --help`"
            )
        dotted, has_value, text = word[2:].partition("=")
        path = tuple(dotted.split("."))
        _check_known(path)
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError("override without a value", where=WHERE, got=word, wanted=f"{word} VALUE")
            text = rest.pop(0)
        pairs.append((path, parse_value(text, annotation_at(path))))
    return pairs


def tell_overrides(error: UserError, file: str, words: Sequence[str], *, told_as: str = WHERE) -> None:
    """Name the overrides as the place of mistakes that they may have made.

    The rules of the configuration in `file` see the overrides laid over it. A mistake at an overridden key is told at
    the overrides, any other at the file with all overrides. `told_as` is the place of the overrides in messages.
    """
    keys = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    for one in (error, *error.more):
        place, _, key = one.where.partition(": ")
        if place == WHERE:
            one.where = one.where.replace(WHERE, told_as, 1)
        said = f"{key}: {one.what}" if key else one.what
        if words and place == file and not one.is_placed and re.match(r"\w+[.:]", said):
            is_own = any(said.startswith((f"{own}:", f"{own}.")) for own in keys)
            told = told_as if is_own else f"{file} with {shlex.join(words)}"
            one.where = f"{told}: {key}" if key else told


def parse_value(text: str, kind: Any = None) -> Any:
    """Return the value of `text`: the text itself where `kind` is a string, else a TOML value, else the bare text."""
    if kind is str:
        return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return _number(text)


def apply_overrides(tables: dict[str, Any], pairs: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """A copy of `tables` with the overrides laid over it. Raises ConfigError for a name that the file does not have."""
    merged = copy.deepcopy(tables)
    for path, value in pairs:
        table = merged
        for depth, key in enumerate(path[:-1], start=1):
            if is_named_collection(path[: depth - 1]) and key not in table:
                raise _unknown_name(path, depth, table)
            child = table.setdefault(key, {})
            if not isinstance(child, dict):
                table[key] = child = {}
            table = child
        table[path[-1]] = value
    return merged


def leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of everything below a table."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= leaves(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def _check_known(path: tuple[str, ...]) -> None:
    for depth in range(1, len(path) + 1):
        head = path[:depth]
        keys = table_keys(head[:-1])
        if "" in path or (keys is not None and head[-1] not in keys):
            raise _unknown_key(path, head)
        if keys is None and annotation_at(head[:-1]) is not None and not _is_open(head[:-1]):
            value = ".".join(head[:-1])
            cure = f"set it as a whole: --{value} VALUE, a list as '[1, 2]', a list of tables as '[{{key = 1}}]'"
            raise ConfigError(
                f"{value} is a value, and has no keys", where=WHERE, got=".".join(path), wanted=value, cure=cure
            )
    if table_keys(path) is not None or is_named_collection(path):
        keys = table_keys(path) or ["<name>"]
        wanted = f"a key of that table ({', '.join(keys)})"
        raise ConfigError("an override sets one value, not a table", where=WHERE, got=".".join(path), wanted=wanted)


def _is_open(path: tuple[str, ...]) -> bool:
    """Whether the schema allows any key below `path` (names of policies, a regime's parameters, task options)."""
    kind = str(annotation_at(path))
    return kind.startswith("dict[") or kind == "typing.Any"


def _unknown_key(path: tuple[str, ...], head: tuple[str, ...]) -> ConfigError:
    near = nearest_key(head)
    keys = table_keys(head[:-1]) or []
    wanted = "" if near else "one of " + ", ".join(keys)
    meant = ".".join([near, *path[len(head) :]])
    return ConfigError(
        "unknown key", where=WHERE, got=".".join(path), wanted=wanted, cure=f"did you mean {meant}?" if near else ""
    )


def _unknown_name(path: tuple[str, ...], depth: int, table: dict[str, Any]) -> ConfigError:
    collection, key = ".".join(path[: depth - 1]), path[depth - 1]
    near = nearest(key, table)
    return ConfigError(
        f"{collection} has no {key!r}",
        where=WHERE,
        got=".".join(path),
        wanted="one of " + ", ".join(table),
        cure=f"did you mean {near}?" if near else f"add [{collection}.{key}] to the file",
    )


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
