r"""The tool calls of model families, read from a policy's text.

hermes   <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>                       Qwen, Hermes
llama3   {"name": ..., "parameters": {...}}, alone or behind <|python_tag|>                 Llama 3
mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}   Mistral
plain    call NAME {...}, at the end                                                        models without a template
none     none: a template that knows no tools, or writes calls in a way that is not known here

`opened_by` makes the syntax of a family whose calls another module reads.

The text includes its special tokens. A call within reasoning, before the mark that ends it, does not count.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, AnyStr

from mrl.errors import RecordError
from mrl.records.canonical_json import parse_json
from mrl.records.episodes import ToolCall
from mrl.tasks.environments.contract import LIMITS, MalformedCall, PolicyTurn

THOUGHT = "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON, MISTRAL, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_LLAMA_CALL = re.compile(r'\{\s*"(name|type|function|parameters|arguments)"')
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]")
_PLAIN = re.compile(r"(?:^|\n)call ([\w.-]+) ")
_PLAIN_BEGUN = re.compile(r"(?:^|\n)(?:c|ca|cal|call(?: [\w.-]*)?)?\Z")
_decoder = json.JSONDecoder()

Call = ToolCall | MalformedCall
Tools = Sequence[Mapping[str, Any]]
"""Tools as chat templates take them, with JSON schemas."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """The way in which one family writes tool calls."""

    name: str
    split: Callable[[str], tuple[str, str]]
    """Text -> the text before its calls, and the text from the first call on, "" where there is none."""
    calls: Callable[[str, Tools], list[Call]]
    """(second part of `split`, available tools) -> the calls in it, in order."""
    undecided: Callable[[str], int]
    """Text without calls that goes on -> number of characters at its end that may begin a call."""
    thought: str = THOUGHT
    """Mark that ends reasoning."""
    most_calls: int = LIMITS.calls
    """Most calls of one turn that the template can express; templates of Llama 3 can express one."""

    def read(self, text: str, *, is_cut: bool = False, tools: Tools = ()) -> PolicyTurn:
        """Read a policy's turn. In a turn that was cut, a broken last call counts as cut off.

        Calls beyond the limit of a turn become one broken call; text beyond its limit raises RecordError.
        """
        turn = PolicyTurn(text, is_cut=is_cut)  # raises for too much text before that is read
        thought, said = self._parted(text)
        before, rest = self.split(said)
        found = self.calls(rest, tools) if rest else []
        if is_cut and found and isinstance(found[-1], MalformedCall):
            found[-1] = MalformedCall("the turn ended in the middle of this tool call, at its token limit")
        if len(found) > LIMITS.calls:
            words = f"{len(found)} tool calls in one turn; {LIMITS.calls - 1} of them were read"
            found = [*found[: LIMITS.calls - 1], MalformedCall(words)]
        calls = tuple(one for one in found if isinstance(one, ToolCall))
        broken = tuple(one for one in found if isinstance(one, MalformedCall))
        if len(calls) > self.most_calls:
            words = (
                f"{len(calls)} tool calls in one turn, which has {self.most_calls} at most; the others were not made"
            )
            calls, broken = calls[: self.most_calls], (*broken, MalformedCall(words))
        return replace(turn, tool_calls=calls, broken=broken, content=thought + before)

    def content_so_far(self, text: str) -> str:
        """Return the part of a growing text that stands before its calls, whatever follows."""
        thought, said = self._parted(text)
        before, rest = self.split(said)
        return thought + (before if rest else said[: len(said) - self.undecided(said)])

    def _parted(self, text: str) -> tuple[str, str]:
        """Split a text into its reasoning, with the mark that ends it, and the rest."""
        thought, mark, said = text.partition(self.thought)
        return (thought + mark, said) if mark else ("", text)


def begun_at_end(text: AnyStr, mark: AnyStr) -> int:
    """Return the length of the longest proper beginning of `mark` with which `text` ends."""
    start = max(0, len(text) - len(mark) + 1)
    while (start := text.find(mark[:1], start)) >= 0:
        if mark.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def syntax_of(template: str) -> ToolSyntax:
    """Return the syntax that a chat template shows; `PLAIN` without a template, `NONE` where it shows no known one."""
    if not template:
        return PLAIN
    if OPEN in template and "arguments" in template and not re.search(r"<function=|<arg_key>|<parameter=", template):
        return HERMES
    if MISTRAL in template:
        return MISTRAL_CALLS
    if PYTHON in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA3
    return NONE


def call_of(value: object) -> Call:
    """Return the call that a JSON value describes. Arguments that are JSON within a text are read too."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('a tool call needs {"name": ..., "arguments": {...}}')
    given: Any = value.get("arguments", value.get("parameters", {}))
    try:
        given = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        return MalformedCall(f"the arguments are no JSON: {error}")
    if not isinstance(given, dict):
        return MalformedCall(f"the arguments of {value['name']:.64} are no object")
    try:
        return ToolCall.of(value["name"], given)
    except RecordError as error:
        return MalformedCall(str(error))


def _parsed(text: str) -> list[Call]:
    """Return the calls of one JSON text: a call, or a list of them."""
    try:
        value = parse_json(text)
    except ValueError as error:
        return [MalformedCall(f"the tool call is no JSON: {error}"[:300])]
    if value == []:
        return [MalformedCall("the list of tool calls is empty")]
    return [call_of(one) for one in value] if isinstance(value, list) else [call_of(value)]


def _ends(text: str, start: int) -> int:
    """Return the place after the JSON value that begins at `start`; the end of the text for a broken value."""
    try:
        return _decoder.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


def _at(mark: str) -> Callable[[str], tuple[str, str]]:
    def split(text: str) -> tuple[str, str]:
        before, found, after = text.partition(mark)
        return before, found + after

    return split


def _undecided(mark: str) -> Callable[[str], int]:
    return lambda text: begun_at_end(text, mark)


def _hermes_calls(text: str) -> list[Call]:
    found: list[Call] = []
    while text.startswith(OPEN) and len(found) <= LIMITS.calls:
        start = len(OPEN) + len(text[len(OPEN) :]) - len(text[len(OPEN) :].lstrip())
        end = _ends(text, start)
        if not text[end:].lstrip().startswith(CLOSE):  # broken or not closed: up to the next mark, or all
            end = closed if (closed := text.find(CLOSE, start)) >= 0 else len(text)
        calls = _parsed(text[start:end].strip())
        if end == len(text) and isinstance(calls[-1], ToolCall):  # whole JSON, but more might have come
            calls[-1] = MalformedCall(f"the tool call is not closed by {CLOSE}")
        found += calls
        text = text[max(0, text.find(OPEN, end)) :] if OPEN in text[end:] else ""
    return found


def _llama_split(text: str) -> tuple[str, str]:
    before, mark, after = text.partition(PYTHON)
    if mark:
        return before, mark + after
    return ("", text) if _LLAMA_CALL.match(text.lstrip()) else (text, "")


def _llama_undecided(text: str) -> int:
    """Return the whole length of a text that begins as JSON, else that of a begun mark at its end."""
    return len(text) if text.lstrip()[:1] in ("", "{") else begun_at_end(text, PYTHON)


def _llama_calls(text: str) -> list[Call]:
    found: list[Call] = []
    rest = text.removeprefix(PYTHON).strip()
    while rest and len(found) <= LIMITS.calls:
        end = _ends(rest, 0)
        found += _parsed(rest[:end])
        rest = rest[end:].lstrip().removeprefix(";").strip()
    return found


def _mistral_calls(text: str) -> list[Call]:
    found: list[Call] = []
    while text and len(found) <= LIMITS.calls:
        rest = text.removeprefix(MISTRAL)
        start, named = len(rest) - len(rest.lstrip()), _NAMED.match(rest)
        end = len(rest)
        if rest[start : start + 1] == "[":
            end = _ends(rest, start)
            found += _parsed(rest[start:end])
        elif named is not None:
            end = _ends(rest, named.end() + len(rest[named.end() :]) - len(rest[named.end() :].lstrip()))
            found += _with_name(named[1], rest[named.end() : end].strip())
        else:
            found.append(MalformedCall(f"a tool call needs a name and {ARGS}"))
        text = rest[rest.find(MISTRAL, end) :] if MISTRAL in rest[end:] else ""
    return found


def _plain_split(text: str) -> tuple[str, str]:
    found = _PLAIN.search(text)
    return (text[: found.start()], text[found.start() :]) if found else (text, "")


def _plain_undecided(text: str) -> int:
    found = _PLAIN_BEGUN.search(text)
    return len(text) - found.start() if found else 0


def _plain_calls(text: str) -> list[Call]:
    found: list[Call] = []
    one = _PLAIN.search(text)
    while one is not None and len(found) <= LIMITS.calls:
        end = _ends(text, one.end())
        found += _with_name(one[1], text[one.end() : end].strip())
        one = _PLAIN.search(text, end)
    return found


def _with_name(name: str, arguments: str) -> list[Call]:
    try:
        return [call_of({"name": name, "arguments": parse_json(arguments)})]
    except ValueError as error:
        return [MalformedCall(f"the arguments of {name} are no JSON: {error}"[:300])]


def plain_calls(calls: Sequence[ToolCall]) -> str:
    """Write calls as models without a template do; a family's template writes its own."""
    return "\n".join(f"call {one.name} {one.arguments}" for one in calls)


def opened_by(mark: str, name: str, calls: Callable[[str, Tools], list[Call]], *, thought: str = THOUGHT) -> ToolSyntax:
    """Return the syntax of a family that begins its calls with `mark`, and ends reasoning with `thought`."""
    return ToolSyntax(name, _at(mark), calls, _undecided(mark), thought)


HERMES = opened_by(OPEN, "hermes", lambda text, _: _hermes_calls(text))
LLAMA3 = ToolSyntax("llama3", _llama_split, lambda text, _: _llama_calls(text), _llama_undecided)
MISTRAL_CALLS = opened_by(MISTRAL, "mistral", lambda text, _: _mistral_calls(text))
PLAIN = ToolSyntax("plain", _plain_split, lambda text, _: _plain_calls(text), _plain_undecided)
NONE = ToolSyntax("none", lambda text: (text, ""), lambda *_: [], lambda _: 0)
