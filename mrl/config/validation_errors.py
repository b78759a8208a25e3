"""pydantic's account of a failed validation, told in one line: key, found, wanted, and the key that was meant."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mrl.config.nearest_key import annotation_at, is_named_collection, nearest, nearest_key, table_keys
from mrl.config.overrides import WHERE
from mrl.config.policy_tables import SERVER_URL
from mrl.config.schema import POLICY_NAME, RUN_NAME, UNIT_TYPE_NAME
from mrl.config.task_tables import SOURCE_NAMES, VERIFIER_NAME
from mrl.errors import ConfigError, RunFolderError

PATTERNS = {
    RUN_NAME: "letters, digits, dots, dashes and underscores, starting with a letter or digit, at most 64",
    POLICY_NAME: "lowercase letters, digits, dashes and underscores, starting with a letter or digit, at most 32",
    UNIT_TYPE_NAME: "letters, digits, spaces and . _ + -, starting with a letter or digit, at most 64",
    VERIFIER_NAME: '"module:function", for example "my_verifiers:passes_tests"',
    SERVER_URL: "http://HOST:PORT or https://HOST:PORT, without a path",
}
"""Pattern of a key -> the texts that match it, in words."""
_WANTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f">= {ctx['ge']}",
    "greater_than": lambda ctx: f"> {ctx['gt']}",
    "less_than_equal": lambda ctx: f"<= {ctx['le']}",
    "less_than": lambda ctx: f"< {ctx['lt']}",
    "multiple_of": lambda ctx: f"a multiple of {ctx['multiple_of']}",
    "literal_error": lambda ctx: str(ctx["expected"]),
    "string_pattern_mismatch": lambda ctx: PATTERNS.get(ctx["pattern"], f"a text that matches {ctx['pattern']}"),
    "string_too_short": lambda ctx: f"at least {ctx['min_length']} character",
    "too_short": lambda ctx: f"at least {ctx['min_length']} entry",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a finite number",
    "string_type": lambda _: "a text in quotes",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "a table",
    "model_type": lambda _: "a table",
}

_UNQUOTED = {
    "int_type": re.compile(r"-?\d+"),
    "float_type": re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?"),
    "bool_type": re.compile("true|false"),
}
"""Kind of a mistake -> the texts that are values of the wanted type between quotes."""


def wanted_by(mistake: ErrorDetails) -> str:
    """Return in plain words what a value should have been; pydantic's own words for a fault that is not known here."""
    kind, ctx = mistake["type"], mistake.get("ctx", {})
    return _WANTED[kind](ctx) if kind in _WANTED else mistake["msg"]


def explain(
    error: ValidationError, tables: Mapping[str, Any], *, where: str, overridden: set[tuple[str, ...]]
) -> ConfigError:
    """Return the first mistake as a ConfigError that holds the others.

    Unknown keys go first, as they often cause the others. A key that is missing because it is misspelt is told once.
    """
    mistakes = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    told: list[ConfigError] = []
    meant: set[str] = set()
    for mistake in mistakes:
        path = tuple(str(part) for part in mistake["loc"] if part != "[key]")
        dotted, is_missing = ".".join(path), mistake["type"] == "missing"
        if is_missing and dotted in meant:
            continue
        is_own = any(path[: len(key)] == key for key in overridden)
        is_unknown = mistake["type"] == "extra_forbidden"
        what, got, wanted, cure = _unknown(path) if is_unknown else _wrong(mistake, path)
        meant.add(nearest_key(path) if is_unknown else "")
        told.append(
            ConfigError(f"{dotted}: {what}", where=WHERE if is_own else where, got=got, wanted=wanted, cure=cure)
        )
        told[-1].is_placed = is_own or not is_missing or not _is_begun(path[:-1], tables, overridden)
    told[0].more = tuple(told[1:])
    return told[0]


def explain_earlier(error: ValidationError, file: Path) -> RunFolderError:
    """Return the first mistake in the configuration that a run has written to `file`, as another version of mrl may."""
    mistake = error.errors(include_url=False)[0]
    if not mistake["loc"]:  # no JSON, or no object
        return RunFolderError(f"damaged ({mistake['msg']})", where=str(file), wanted="what the run wrote at its start")
    found = explain(error, {}, where=str(file), overridden=set())
    cure = "use the version of mrl that started this run"
    return RunFolderError(found.what, where=found.where, got=found.got, wanted=found.wanted, cure=cure)


def _is_begun(path: tuple[str, ...], tables: Mapping[str, Any], overridden: set[tuple[str, ...]]) -> bool:
    """Whether overrides alone have begun the table at `path`."""
    own = {key[len(path)] for key in overridden if len(key) > len(path) and key[: len(path)] == path}
    if not path or not own:
        return False
    for key in path:
        tables = tables[key]
    return own.issuperset(tables)


def _unknown(path: tuple[str, ...]) -> tuple[str, object, str, str]:
    near = nearest_key(path)
    keys = table_keys(path[:-1]) or []
    wanted = "" if near else "one of " + ", ".join(keys)
    return "unknown key", path[-1], wanted, f"did you mean {near}?" if near else ""


def _wrong(mistake: ErrorDetails, path: tuple[str, ...]) -> tuple[str, object, str, str]:
    kind = mistake["type"]
    if kind == "missing":
        return "missing", "", _describe(path), _adding(path)
    wanted = wanted_by(mistake)
    found = mistake["input"]
    if mistake["loc"][-1] == "[key]":
        return "not a valid name", path[-1], wanted, ""
    if kind == "string_pattern_mismatch" and path[-1] == "verifier":
        module, _, function = str(found).rpartition(".")
        named = f"{module}:{function}" if module and function else f"{found}:FUNCTION"
        cure = "" if ":" in str(found) else f'set {".".join(path)} = "{named}"'
        return "invalid value", found, wanted, cure
    if kind in _UNQUOTED and isinstance(found, str) and _UNQUOTED[kind].fullmatch(found):
        return "invalid value", found, wanted, "remove the quotes"
    near = nearest(found, _choices(path)) if kind == "literal_error" and isinstance(found, str) else ""
    return "invalid value", found, wanted, f"did you mean {near!r}?" if near else ""


def _choices(path: tuple[str, ...]) -> list[str]:
    return [str(choice) for choice in getattr(annotation_at(path), "__args__", ())]


def _adding(path: tuple[str, ...]) -> str:
    if is_named_collection(path):
        return f"add a table [{'.'.join(path)}.NAME]"
    if table_keys(path) is not None:
        return f"add a table [{'.'.join(path)}]"
    return f"add `{path[-1]} = ...`" + (f" below [{'.'.join(path[:-1])}]" if len(path) > 1 else "")


def _describe(path: tuple[str, ...]) -> str:
    if path[0] == "tasks" and path[2:] == ("source",):
        return f"one of {', '.join(SOURCE_NAMES)}, or a plug-in"
    kind = annotation_at(path)
    names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    return names.get(kind, "a table" if table_keys(path) is not None else "")
