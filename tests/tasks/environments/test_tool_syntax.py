"""Tool calls of every family as they are written, and what cannot be read."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mrl.records.episodes import ToolCall
from mrl.tasks.environments.contract import LIMITS, PolicyTurn
from mrl.tasks.environments.tool_syntax import (
    HERMES,
    LLAMA3,
    MISTRAL_CALLS,
    NONE,
    PLAIN,
    plain_calls,
    syntax_of,
)

FAMILIES = [HERMES, LLAMA3, MISTRAL_CALLS, PLAIN]
LOOK = ToolCall.of("look", {"key": "b", "n": 2})
PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name":',
    '"f"',
    "}",
    "[TOOL_CALLS]",
    "[ARGS]",
    "call f ",
    "\n",
    "[",
    "</think>",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def written(call: ToolCall, arguments: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call.name)}, "{arguments}": {call.arguments}}}'


def hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{written(one)}\n</tool_call>" for one in calls)


WRITERS = {
    HERMES: hermes,
    LLAMA3: lambda calls: "; ".join(written(one, "parameters") for one in calls),
    MISTRAL_CALLS: lambda calls: f"[TOOL_CALLS] [{', '.join(map(written, calls))}]",
    PLAIN: plain_calls,
}
"""As the chat templates of the families have it."""


CUT = "the turn ended in the middle of this tool call, at its token limit"
NO_JSON = "the tool call is no JSON"


def told(turn: PolicyTurn) -> list[str]:
    """What the policy is told of its broken calls, without what a parser says of them."""
    return [one.words.partition(":")[0] for one in turn.broken]


@pytest.mark.parametrize(
    ("syntax", "text", "content"),
    [
        (HERMES, '<tool_call>\n{"name": "look", "arguments": {"n": 2, "key": "b"}}\n</tool_call>', ""),
        (
            HERMES,
            'Let me see.\n<tool_call>{"name":"look","arguments":{"n":2.0,"key":"b"}}</tool_call>',
            "Let me see.\n",
        ),
        (HERMES, '<tool_call>{"name":"look","arguments":"{\\"n\\":2,\\"key\\":\\"b\\"}"}</tool_call>', ""),
        (LLAMA3, '{"name": "look", "parameters": {"key": "b", "n": 2}}', ""),
        (LLAMA3, '<|python_tag|>{"type": "function", "name": "look", "parameters": {"key": "b", "n": 2}}', ""),
        (MISTRAL_CALLS, '[TOOL_CALLS] [{"name": "look", "arguments": {"key": "b", "n": 2}, "id": "abcdefghi"}]', ""),
        (MISTRAL_CALLS, 'So:[TOOL_CALLS]look[CALL_ID]abc[ARGS]{"key": "b", "n": 2}', "So:"),
        (PLAIN, 'so\ncall look {"key":"b","n":2}', "so"),
    ],
)
def test_each_family_is_read(syntax, text, content):
    """To the same call, whatever its spelling, and what was said before it."""
    turn = syntax.read(text)
    assert (turn.tool_calls, turn.broken, turn.content, turn.text) == ((LOOK,), (), content, text)


ADD, WAIT = ToolCall.of("add", {"a": 1}), ToolCall.of("wait", {})
IN_TURN = (written(LOOK), "7", written(ADD))


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HERMES, "{} then {}{}".format(*(f"<tool_call>{one}</tool_call>" for one in IN_TURN))),
        (LLAMA3, f"\n {'; '.join(IN_TURN)}".replace("arguments", "parameters")),
        (MISTRAL_CALLS, f"[TOOL_CALLS] [{', '.join(IN_TURN)}]"),
        (MISTRAL_CALLS, "".join(f"[TOOL_CALLS] [{one}]" for one in IN_TURN)),
        (
            MISTRAL_CALLS,
            f"[TOOL_CALLS]look[ARGS] {LOOK.arguments}[TOOL_CALLS]f[ARGS]7[TOOL_CALLS]add[ARGS]{ADD.arguments}",
        ),
        (PLAIN, f"call look {LOOK.arguments}\ncall f 7\ncall add {ADD.arguments}"),
        (HERMES, "".join(f"<tool_call>{one}</tool_call>" for one in (written(LOOK), "{", written(ADD)))),
    ],
)
def test_calls_on_either_side_of_a_broken_one_are_made(syntax, text):
    """Each on its own, in the order in which they were written."""
    turn = syntax.read(text)
    assert turn.tool_calls == (LOOK, ADD)
    assert len(turn.broken) == 1


@pytest.mark.parametrize(
    ("value", "call"),
    [
        ('{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}', ADD),
        ('{"name": "wait"}', WAIT),
        ('{"name": "wait", "arguments": "{"}', "the arguments are no JSON"),
        ('{"name": "wait", "arguments": "7"}', "the arguments of wait are no object"),
    ],
)
def test_a_call_as_the_api_writes_it_is_read(value, call):
    """Within "function", with arguments as JSON in a text, or without any."""
    turn = HERMES.read(f"<tool_call>{value}</tool_call>")
    assert (*turn.tool_calls, *told(turn)) == (call,)


@pytest.mark.parametrize("syntax", FAMILIES, ids=lambda one: one.name)
@given(arguments=st.dictionaries(st.text(), JSON, max_size=3), count=st.integers(1, 3))
def test_what_is_written_is_read_again(syntax, arguments, count):
    """Any arguments, one call or several, but for marks that are tokens of their own: what ends reasoning or text."""
    calls = (ToolCall.of("look", arguments),) * count
    assume(not any(mark in calls[0].arguments for mark in ("</think>", "<|python_tag|>")))
    assert syntax.read(WRITERS[syntax](calls)).tool_calls == calls


@pytest.mark.parametrize("syntax", [*FAMILIES, NONE], ids=lambda one: one.name)
@given(text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_read(syntax, text):
    """Nothing raises; the text stays as it is."""
    turn = syntax.read(text, is_cut=True)
    assert turn.text == text
    assert text.startswith(turn.content)


@pytest.mark.parametrize(
    ("syntax", "text", "words"),
    [
        (HERMES, '<tool_call>{"name": "look", "arguments": {"key": </tool_call>', NO_JSON),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"key": 1, "key": 2}}</tool_call>', NO_JSON),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"key": NaN}}</tool_call>', NO_JSON),
        (HERMES, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "the arguments of look are no object"),
        (HERMES, '<tool_call>{"tool": "look"}</tool_call>', 'a tool call needs {"name"'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {}}', "the tool call is not closed by </tool_call>"),
        (LLAMA3, '{"name": "look", "parameters": {"key": "b"', NO_JSON),
        (LLAMA3, '<|python_tag|>look.call(key="b")', NO_JSON),
        (MISTRAL_CALLS, '[TOOL_CALLS] [{"name": "look", "arguments": {}}', NO_JSON),
        (MISTRAL_CALLS, "[TOOL_CALLS]", "a tool call needs a name and [ARGS]"),
        (PLAIN, "call look {", "the arguments of look are no JSON"),
    ],
)
def test_what_cannot_be_read_is_told(syntax, text, words):
    """At the token limit, a call that is not whole counts as cut."""
    assert told(syntax.read(text)) == [words]
    assert told(syntax.read(text, is_cut=True)) == [CUT]
    assert not syntax.read(text).tool_calls


@pytest.mark.parametrize("syntax", [*FAMILIES, NONE], ids=lambda one: one.name)
@given(text=st.lists(st.sampled_from([*PIECES, "a", " ", "<|python_tag|>", "<", "[", "call"])).map("".join))
@example(text='a{"name":')
@example(text='</think> {"name":')
@example(text="so\ncall f {")
def test_what_is_read_of_a_text_that_goes_on_stays(syntax, text):
    """Whatever comes behind: it is the beginning of what is read of the whole."""
    turn = syntax.read(text)
    said = turn.text if turn.broken else turn.content
    for end in range(len(text) + 1):
        assert said.startswith(syntax.content_so_far(text[:end]))


@pytest.mark.parametrize("syntax", FAMILIES, ids=lambda one: one.name)
def test_no_more_is_held_back_of_a_text_than_may_be_a_call(syntax):
    """What turns out to be none comes, too."""
    text = "a <tool [TOOL <|pyt\ncalling"
    assert syntax.content_so_far(text) == text


def test_calls_before_a_cut_one_count():
    """The whole one is made, the other one is told to be cut."""
    text = hermes([LOOK]) + '\n<tool_call>\n{"name": "lo'
    turn = HERMES.read(text, is_cut=True)
    assert turn.tool_calls == (LOOK,)
    assert told(turn) == [CUT]
    assert HERMES.read(hermes([LOOK]), is_cut=True).tool_calls == (LOOK,)


def test_too_many_calls_are_one_broken_one():
    """So many as a turn may hold are made."""

    def one_by_one(calls):
        return "".join(f"[TOOL_CALLS]{one.name}[ARGS]{one.arguments}" for one in calls)

    for syntax, write in [*WRITERS.items(), (MISTRAL_CALLS, one_by_one)]:
        assert syntax.read(write([LOOK] * LIMITS.calls)).tool_calls == (LOOK,) * LIMITS.calls
        for beyond in (1, 5):
            turn = syntax.read(write([LOOK] * (LIMITS.calls + beyond)))
            assert len(turn.tool_calls) == LIMITS.calls - 1
            (words,) = told(turn)
            assert "tool calls in one turn" in words


def test_a_call_that_the_template_has_no_room_for_is_told():
    """The others are made: there are templates of one call in a turn."""
    turn = replace(LLAMA3, most_calls=1).read(WRITERS[LLAMA3]([LOOK] * 3))
    assert turn.tool_calls == (LOOK,)
    (broken,) = turn.broken
    assert broken.words == "3 tool calls in one turn, which has 1 at most; the others were not made"
    assert replace(LLAMA3, most_calls=1).read(WRITERS[LLAMA3]([LOOK])).broken == ()


def test_reasoning_makes_no_calls():
    """What stands before </think> was only thought."""
    thought = f"<think>\n{hermes([LOOK])}\n</think>\n\n"
    assert HERMES.read(thought + "b").tool_calls == ()
    turn = HERMES.read(thought + hermes([LOOK]))
    assert turn.tool_calls == (LOOK,)
    assert turn.content == thought


def test_an_answer_that_looks_like_json_is_no_call():
    """Of Llama's a text is a call only where it begins as one."""
    for text in ("{1, 2}", '{"answer": 3}', "b"):
        assert LLAMA3.read(text).tool_calls == LLAMA3.read(text).broken == ()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "plain"),
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("'[TOOL_CALLS] ['", "mistral"),
        ("<|start_header_id|>ipython ... '\"parameters\": '", "llama3"),
        ("<|im_start|>", "none"),
        ("<|start_header_id|>ipython", "none"),
        ("'\"parameters\": '", "none"),
        ("<tool_call>\\n<function=example> arguments", "none"),
        ("<tool_call>{name}\\n<arg_key> arguments", "none"),
    ],
)
def test_a_template_shows_its_family(template, name):
    """Those that write arguments otherwise than as JSON are not known."""
    assert syntax_of(template).name == name


def test_an_empty_list_of_calls_is_a_broken_call() -> None:
    """Also where it is not closed."""
    for text in ("<tool_call>[]", "<tool_call>\n[]\n</tool_call>"):
        turn = HERMES.read(text)
        assert told(turn) == ["the list of tool calls is empty"], text
        assert not turn.tool_calls
