"""Requests of chat clients are read as they mean it, and answered as they read it."""

import pytest

from mrl.gateway.chat_wire import ChatRefusal, completion, is_same, read_chat, said_by
from mrl.records.episodes import Message, ToolCall
from mrl.tasks.environments.contract import MalformedCall, PolicyTurn

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
DEEP = {"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def asked(**changes):
    """A request that is right but for the changes."""
    return {"model": "qwen", "messages": [{"role": "user", "content": "Hi"}]} | changes


def test_a_conversation_is_read():
    """Parts are joined, a developer is the system, and a tool's answer has the name of its call."""
    call = read_chat(asked(messages=TALK, tools=[ADD], stream=True, temperature=0.5, user="me"), models=["qwen"])
    assert call.messages == (
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", "", (ToolCall("add", '{"a":1,"b":2}'),)),
        Message("tool", "3", name="add"),
    )
    assert [tool.name for tool in call.tools] == ["add"]
    assert call.is_streamed
    assert call.unheeded == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gpt-4"}, "wanted 'qwen'"),
        ({"n": 2}, "omit n"),
        ({"messages": []}, "at least one message"),
        ({"messages": "Hi"}, "at least one message"),
        ({"messages": ["Hi"]}, r"messages\[0\]"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "neither images"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "no.*UTF-8|not UTF-8"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "id and function"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "not JSON",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "3"}}]}
                ]
            },
            "not a JSON object",
        ),
        ({"tools": [{"type": "function"}]}, "tools: wanted"),
        ({"tools": 5}, "tools: wanted a list"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls: wanted a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "not JSON"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "not a JSON schema",
        ),
    ],
)
def test_what_cannot_be_answered_is_told(changes, words):
    """Every mistake names its place and what was wanted."""
    with pytest.raises(ChatRefusal, match=words):
        read_chat(asked(**changes), models=["qwen", "policy"])


def test_a_turn_is_answered_with_its_calls():
    """Arguments are text, as clients want them; content is null where there are calls alone."""
    turn = PolicyTurn("<tool_call>...", tool_calls=(ToolCall("add", '{"a":1}'),), content="")
    whole = completion("s-1", "qwen", turn, said_by(turn), created_s=5)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}


@pytest.mark.parametrize(("is_cut", "reason"), [(True, "length"), (False, "stop")])
def test_why_a_turn_ended_is_told(is_cut, reason):
    """A client has to know that an answer was cut."""
    turn = PolicyTurn("Hi", is_cut=is_cut)
    assert completion("s-1", "qwen", turn, said_by(turn), created_s=5)["choices"][0]["finish_reason"] == reason


def test_a_broken_call_is_text():
    """Nothing of what the policy said is lost to the agent."""
    turn = PolicyTurn("well <tool_call>{", broken=(MalformedCall("no"),), content="well ")
    assert said_by(turn) == Message("assistant", "well <tool_call>{")


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (Message("assistant", " a "), Message("assistant", "a"), True),
        (Message("user", " a "), Message("user", "a"), False),
        (Message("assistant", "a", (ToolCall("f"),)), Message("assistant", "a"), False),
    ],
)
def test_messages_that_come_back_are_compared(one, other, wanted):
    """Clients strip the policy's words; nothing else may differ."""
    assert is_same(one, other) is wanted
