"""Methods of a class as tools: a schema from type hints and docstring, and calls with checked arguments.

Docstrings have the form of transformers' and TRL's tools: the tool's purpose, then `Args:` with a line per argument.
"""

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mrl.errors import RecordError
from mrl.records.canonical_json import canonical_json
from mrl.records.episodes import ToolCall, ToolSpec

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?)\s*:\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolMistake(Exception):
    """The reason for which a method can be no tool, or a call does not fit its tool."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One method of a class that policies call."""

    spec: ToolSpec
    method: str
    hints: dict[str, Any]
    required: frozenset[str]

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call in the types of the method. Raises ToolMistake where they do not fit."""
        given = call.values
        if unknown := sorted(set(given) - set(self.hints)):
            raise ToolMistake(f"{call.name} takes no {unknown[0]!r}; it takes {', '.join(self.hints) or 'nothing'}")
        if missing := sorted(self.required - set(given)):
            raise ToolMistake(f"{call.name} needs {missing[0]!r}")
        found = {}
        for name, value in given.items():
            try:
                found[name] = msgspec.convert(value, self.hints[name])
            except msgspec.ValidationError as error:
                raise ToolMistake(f"{name}: {error}") from None
        return found


def tool_of(name: str, function: Callable[..., Any]) -> Tool:
    """Return a class's method as a tool. Raises ToolMistake, with the cure, for a method that can be none."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ToolMistake(f"a type hint cannot be read: {error}") from None
    described = argument_texts(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ToolMistake(f"the argument {one} cannot be passed by name; declare each argument by itself")
        if one.name not in hints:
            raise ToolMistake(f"the argument {one.name!r} has no type hint; write for example {one.name}: str")
        properties[one.name] = _schema(one.name, hints[one.name])
        if one.name in described:
            properties[one.name]["description"] = described[one.name]
    required = [one.name for one in parameters if one.default is one.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    try:
        spec = ToolSpec(name, purpose(inspect.getdoc(function) or ""), canonical_json(schema))
    except RecordError as error:
        raise ToolMistake(str(error)) from None
    return Tool(spec, name, {one.name: hints[one.name] for one in parameters}, frozenset(required))


def purpose(docstring: str) -> str:
    """Return a docstring up to its first section, in one line."""
    lines = []
    for line in docstring.splitlines():
        if _SECTION.match(line):
            break
        lines.append(line.strip())
    return " ".join(" ".join(lines).split())


def argument_texts(docstring: str) -> dict[str, str]:
    """Return name -> description, from the `Args:` section."""
    found: dict[str, str] = {}
    section = last = ""
    indent = 0
    for line in docstring.splitlines():
        if heading := _SECTION.match(line):
            section, last = heading[1], ""
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            argument = _ARGUMENT.match(line)
            if argument and (not last or depth <= indent):
                last, indent = argument[1], depth
                found[last] = argument[2].strip()
            elif last:
                found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _schema(name: str, hint: Any) -> dict[str, Any]:
    """Return the JSON schema of one argument."""
    try:
        schema = msgspec.json.schema(hint)
    except TypeError:  # its message has several lines
        schema = {"$ref": hint}
    if "$ref" in str(schema):
        kind = getattr(hint, "__name__", hint)
        raise ToolMistake(f"the argument {name!r} has the type {kind}; wanted str, int, float, bool, list or dict")
    schema.pop("$schema", None)
    return schema
