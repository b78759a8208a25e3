"""pydantic's account of a failed validation, said in one line: key, found, wanted, and the key that was meant."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mrl.config.nearest_key import annotation_at, nearest, nearest_key, table_keys
from mrl.errors import ConfigError

_WANTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f">= {ctx['ge']}",
    "greater_than": lambda ctx: f"> {ctx['gt']}",
    "less_than_equal": lambda ctx: f"<= {ctx['le']}",
    "less_than": lambda ctx: f"< {ctx['lt']}",
    "multiple_of": lambda ctx: f"a multiple of {ctx['multiple_of']}",
    "literal_error": lambda ctx: str(ctx["expected"]),
    "string_pattern_mismatch": lambda ctx: f"a name that matches {ctx['pattern']}",
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


def explain(
    error: ValidationError, tables: Mapping[str, Any], *, where: str, overridden: set[tuple[str, ...]]
) -> ConfigError:
    """The first mistake as a ConfigError; unknown keys go first, because they often cause the others."""
    mistakes = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    first = mistakes[0]
    path = tuple(str(part) for part in first["loc"] if part != "[key]")
    spot = "command line" if path in overridden else where
    told = _unknown(path) if first["type"] == "extra_forbidden" else _wrong(first, path)
    more = f" (and {len(mistakes) - 1} more mistakes)" if len(mistakes) > 1 else ""
    what, got, wanted, cure = told
    return ConfigError(f"{'.'.join(path)}: {what}{more}", where=spot, got=got, wanted=wanted, cure=cure)


def _unknown(path: tuple[str, ...]) -> tuple[str, object, str, str]:
    near = nearest_key(path)
    keys = table_keys(path[:-1]) or []
    wanted = "" if near else "one of " + ", ".join(keys)
    return "unknown key", path[-1], wanted, f"did you mean {near}?" if near else ""


def _wrong(mistake: ErrorDetails, path: tuple[str, ...]) -> tuple[str, object, str, str]:
    kind, ctx = mistake["type"], mistake.get("ctx", {})
    if kind == "missing":
        return "missing", "", _describe(path), f"add `{path[-1]} = ...`" + _below(path)
    wanted = _WANTED[kind](ctx) if kind in _WANTED else mistake["msg"]
    found = mistake["input"]
    if mistake["loc"][-1] == "[key]":
        return "not a valid name", path[-1], wanted, ""
    near = nearest(found, _choices(path)) if kind == "literal_error" and isinstance(found, str) else ""
    return "not valid", found, wanted, f"did you mean {near!r}?" if near else ""


def _choices(path: tuple[str, ...]) -> list[str]:
    return [str(choice) for choice in getattr(annotation_at(path), "__args__", ())]


def _below(path: tuple[str, ...]) -> str:
    return f" below [{'.'.join(path[:-1])}]" if len(path) > 1 else ""


def _describe(path: tuple[str, ...]) -> str:
    kind = annotation_at(path)
    names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    return names.get(kind, "a table" if table_keys(path) is not None else "")
