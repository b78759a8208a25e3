"""Tool calls as the package `renderers` reads them, checked by the family's tags before and given the tools' types
after.

Families that write arguments between tags write the text "7" and the number 7 alike. Their calls are checked once
before the package reads them: its patterns pass over tags that are not closed, and take long for many of them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.records.canonical_json import parse_json

Tools = Sequence[Mapping[str, Any]]
"""Tools as chat templates take them, with JSON schemas."""

PYTHON = {"True": True, "False": False, "None": None}
"""Spellings of values by templates of some families, Qwen3.5's among them, which policies learn to write."""
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
"""Python type -> the name that schemas give to its JSON values; null is apart."""
ANY = frozenset({*KINDS.values(), "null"})

_TAG = re.compile(r'<(/?)(?:(function|parameter|invoke|arg_key|arg_value)(=|>| name="))')
_NAME = re.compile(r'[^<>"\n]+"?>')
_LETTERS = {"function": "F", "parameter": "P", "invoke": "I", "arg_key": "K", "arg_value": "V"}
_BLOCK = re.compile(r"(?:F(?:P[^Pp]*p)*f?)?|(?:I(?:P[^Ppi]*p)*i)*|(?:K[^Kk]*kV[^Vv]*v)*")
"""Tags of one whole call, or of several of MiniMax; the text of an argument may hold tags of other kinds than its
own."""


class FamilyCall(NamedTuple):
    """A tool call that a turn makes, or tries to make."""

    name: str
    arguments: object
    fault: str
    """Why the call cannot be read, in a word or two; "" for a whole call."""


def tags_of(text: str) -> str:
    """Return a letter for each tag: small for one that closes, "x" for a malformed tag."""
    return "".join(map(_letter, _TAG.finditer(text)))


def is_whole(block: str) -> bool:
    """Whether every tag of a call is closed before the next one of its kind begins."""
    return _BLOCK.fullmatch(tags_of(block)) is not None


def for_package(tools: Tools) -> list[dict[str, Any]]:
    """Return the tools with no more than the package asks for: their names, and which arguments stay text."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "parameters": {
                    "properties": {
                        key: {"type": "string"} if "string" in kinds else {} for key, kinds in _arguments(tool).items()
                    }
                },
            },
        }
        for tool in tools
    ]


def read_call(call: Any, tools: Tools, *, is_tagged: bool) -> FamilyCall:
    """Return a call that the package read, with arguments of types that the tool allows where the family writes no
    types.
    """
    # A call of an unknown tool is no fault here: the environment says which tools there are.
    fault = "" if call.status in ("ok", "unknown_tool") else call.status.replace("_", " ")
    arguments = call.arguments
    if is_tagged and isinstance(arguments, dict) and call.status in ("ok", "invalid_json"):
        called = [_arguments(tool) for tool in tools if tool["function"]["name"] == call.name]
        kinds = {key: one for tool in called for key, one in tool.items()}
        arguments = {
            key: _typed(value, kinds[key]) if isinstance(value, str) and key in kinds else value
            for key, value in arguments.items()
        }
        if all(not isinstance(value, str) or "string" in kinds.get(key, ()) for key, value in arguments.items()):
            fault = ""
    return FamilyCall(call.name or "", arguments, fault)


def _letter(tag: re.Match[str]) -> str:
    closes, kind, behind = tag.groups()
    letter = _LETTERS[kind]
    if closes:
        return letter.lower() if behind == ">" else "x"
    if behind == ">":
        return letter if letter in "KV" else "x"
    return letter if _NAME.match(tag.string, tag.end()) else "x"


def _arguments(tool: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return argument of a tool -> JSON types that its schema allows."""
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: frozenset(_kinds(one, parameters, set())) or ANY for key, one in properties.items()}


def _kinds(schema: object, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """Return the JSON types that a schema allows; a reference in `seen` adds none. All of them for a schema that is not
    understood.
    """
    if not isinstance(schema, dict):
        return set(ANY)
    if isinstance(name := schema.get("$ref"), str):
        if name in seen:
            return set()
        seen.add(name)
        found: Any = root
        for part in name.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        return _kinds(found, root, seen)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return {_kind(value) for value in values}
    if kinds := schema.get("type"):
        return {kinds} if isinstance(kinds, str) else set(kinds)
    branches = [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, [])]
    return set().union(*(_kinds(one, root, seen) for one in branches)) if branches else set(ANY)


def _kind(value: object) -> str:
    return KINDS.get(type(value), "null")


def _typed(text: str, kinds: frozenset[str]) -> object:
    """Return the value of a text between tags: as another type where it reads as one that is allowed, else the text
    itself.
    """
    if "string" not in kinds:  # the package has read it already where it is JSON
        return PYTHON.get(text, text)
    try:
        value = PYTHON[text] if text in PYTHON else parse_json(text)
    except ValueError:
        return text
    is_allowed = _kind(value) in kinds or (isinstance(value, int) and not isinstance(value, bool) and "number" in kinds)
    return value if is_allowed else text
