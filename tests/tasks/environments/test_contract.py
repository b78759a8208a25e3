"""What crosses between a policy and an environment keeps its limits, and JSON has one spelling."""

import json
import math

import msgspec
import pytest

from mrl.errors import RecordError
from mrl.records.canonical_json import canonical_json, parse_json
from mrl.records.episodes import Message, ToolCall, ToolSpec, as_chat
from mrl.tasks.environments.contract import LIMITS, EnvironmentTurn, MalformedCall, PolicyTurn


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": [1, 2.0, None], "a": True}, '{"a":true,"b":[1,2,null]}'),
        ({"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7},
         '{"\\r":2,"1":4,"\u0080":6,"\u00f6":7,"\u20ac":1,"\U0001f600":5,"\ufb33":3}'),
        ([1e21, 1e16, 1e-7, 1e-6, 1.5e-5, 0.1, -0.0, 123456789012345678901], 
         "[1e+21,10000000000000000,1e-7,0.000001,0.000015,0.1,0,123456789012345678901]"),
        ("\u2028\x07\"", '"\u2028\\u0007\\""'),
    ],
)  # fmt: skip
def test_equal_json_has_one_spelling(value: object, text: str) -> None:
    """Keys by UTF-16 units and numbers as ECMAScript, as the examples of RFC 8785 have them; it reads back equal."""
    assert canonical_json(value) == text
    assert canonical_json(parse_json(text)) == text
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "text", ["{", '{"a":1,"a":2}', "NaN", "[" * 100_000, "[" * 70 + "]" * 70, '"\\ud800"', "1e999"]
)
def test_json_that_has_no_one_value_is_refused(text: str) -> None:
    """Broken, ambiguous, not finite, too deep, no text."""
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it, by whichever part of the parser
        parse_json(text)


def test_a_call_is_canonical() -> None:
    """Made of values it is; arguments of another spelling, or that are no object, are refused."""
    assert ToolCall.of("look", {"b": 1, "a": "x"}).arguments == '{"a":"x","b":1}'
    for arguments in ('{"b": 1}', '{"b":1,"a":2}', "[]", "{"):
        with pytest.raises(RecordError, match="arguments of look"):
            ToolCall("look", arguments)
    for name in ("", "a\nb", "x" * 65, "\ud800"):
        with pytest.raises(RecordError, match=r"name|UTF-8"):
            ToolCall(name)


TOOL = ToolSpec("f", "x" * 60_000, '{"type":"object"}')


def row_of(messages: int, text_bytes: int) -> EnvironmentTurn:
    """A whole conversation."""
    return EnvironmentTurn((Message("user", "x" * text_bytes),) * messages, begins_row=True)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Message("robot", "x"), "role 'robot'"),  # type: ignore[arg-type]
        (lambda: Message("user", "\ud800"), "UTF-8"),
        (lambda: Message("user", "x" * (LIMITS.turn_bytes + 1)), "1,048,577 bytes"),
        (lambda: Message("user", "x", (ToolCall("f"),)), "role user has tool calls"),
        (lambda: EnvironmentTurn((Message("user", "x" * 600_000),) * 2), "1,200,000 bytes"),
        (lambda: EnvironmentTurn(begins_row=True), "a new row has no message"),
        (lambda: row_of(4, 600_000), "messages of 2,400,000 bytes; at most 2,097,152"),
        (lambda: EnvironmentTurn(tools=(TOOL,) * 20), "tools of 1,200,340 bytes; at most 1,048,576"),
        (lambda: row_of(5000, 0), "5,000 messages and 0 tools; at most 4,096 messages and 128 tools"),
        (lambda: EnvironmentTurn(reward=math.nan), "reward nan"),
        (lambda: EnvironmentTurn(reward=2e6), "reward 2000000"),
        (lambda: EnvironmentTurn(done=True), "do not match"),
        (lambda: EnvironmentTurn(reason="done"), "do not match"),
        (lambda: EnvironmentTurn(done=True, reason="tired"), "do not match"),
        (lambda: PolicyTurn("x", (ToolCall("f"),) * 60, (MalformedCall("y"),) * 5), "65 tool calls"),
        (lambda: ToolSpec("f", "", '{"type":"string"}'), "not a JSON schema of type"),
        (lambda: ToolSpec("f", "x" * 70_000, '{"type":"object"}'), "schema of f"),
    ],
)
def test_what_breaks_a_limit_is_never_made(made: object, told: str) -> None:
    """The error names what, and the limit."""
    with pytest.raises(RecordError, match=told):
        made()  # type: ignore[operator]


def test_a_row_may_be_longer_than_a_turn() -> None:
    """It is a whole conversation."""
    assert len(row_of(4096, 400).messages) == 16 * LIMITS.messages


def test_a_turn_crosses_processes_and_is_checked_there() -> None:
    """By msgpack, to the same value; a limit that is broken in the bytes is found by whoever reads them."""
    turn = EnvironmentTurn((Message("tool", "7", name="look"),), done=True, reward=1.0, reason="done")
    decode = msgspec.msgpack.Decoder(EnvironmentTurn).decode

    assert decode(msgspec.msgpack.encode(turn)) == turn
    with pytest.raises(msgspec.ValidationError, match="reward nan"):
        decode(msgspec.msgpack.encode({"reward": math.nan}))


def test_templates_take_messages_and_tools() -> None:
    """Arguments are an object there, as templates of Llama and Mistral need it."""
    (call,) = as_chat([Message("assistant", "", (ToolCall.of("look", {"key": "b"}),))])
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": {"key": "b"}}
    tool = ToolSpec("look", "Looks.", canonical_json({"type": "object", "properties": {}})).as_chat()
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
