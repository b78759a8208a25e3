"""What crosses of an episode, and what a single answer pays for it."""

import msgspec
import pytest

from mrl.errors import RecordError
from mrl.records.codec import decode, decoder, encode
from mrl.records.episodes import (
    MAX_LAST_CHARS,
    MAX_LAST_MESSAGES,
    MAX_NAME_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_TURN_BYTES,
    MAX_TURN_CALLS,
    MAX_TURN_MESSAGES,
    EpisodeSegment,
    Message,
    ToolCall,
    ToolSpec,
    as_chat,
    conversation_to_read,
    shortened,
    transcript,
)
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, sampled_places
from mrl.records.version import Version, VersionSpan

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
TURNS = [
    EpisodeSegment(
        num_tokens=2, is_sampled=True, messages=(Message(role="assistant", content="hm", tool_calls=(CALL,)),)
    ),
    EpisodeSegment(num_tokens=3, is_sampled=False, messages=(Message(role="tool", content="7", name="look_up"),)),
    EpisodeSegment(num_tokens=1, is_sampled=True, messages=(Message(role="assistant", content="7"),)),
    EpisodeSegment(num_tokens=0, is_sampled=False, messages=(Message(role="user", content="right"),)),
]
ANSWER = {
    "token_ids": b"\1\0\0\0",
    "logprobs": b"\0\0\0\0",
    "versions": [VersionSpan(1, Version(0, 3))],
    "completion": b"a",
    "finish_reason": FinishReason.STOP,
    "reward": 1.0,
}


def test_an_answer_without_turns_pays_nothing_for_them():
    """Fields of episodes are not on the wire where they say nothing."""
    sent = encode(Answer(**ANSWER))

    assert set(msgspec.msgpack.decode(sent)) == set(ANSWER)
    assert decode(sent, decoder(Answer)) == Answer(**ANSWER)
    assert Answer(**ANSWER).is_sampled is None


def test_turns_cross_whole():
    """Roles, calls and what was sampled come back as they were."""
    sent = Answer(**ANSWER, segments=TURNS, ending="done")

    assert decode(encode(sent), decoder(Answer)) == sent


def test_places_of_a_row_are_those_of_its_turns():
    """A turn without tokens takes none."""
    assert sampled_places(TURNS).tolist() == [True, True, False, False, False, True]


def test_a_conversation_reads_as_people_write_it():
    """Calls stand behind what was said beside them."""
    said = transcript([message for turn in TURNS for message in turn.messages])

    assert said.split("\n") == [
        'assistant: hm look_up({"key":"b"})',
        "tool look_up: 7",
        "assistant: 7",
        "user: right",
    ]
    assert (
        transcript([Message("assistant", "", (CALL, CALL))]) == 'assistant: look_up({"key":"b"}) look_up({"key":"b"})'
    )


NO_ARGUMENTS = '{"type":"object"}'
LONG_NAME = "n" * MAX_NAME_CHARS


def test_what_is_within_its_bounds_is_a_message():
    """Each at its bound."""
    call = ToolCall(LONG_NAME, "{}")
    assert Message("assistant", "x" * (MAX_TURN_BYTES - call_bytes(call)), (call,)).num_bytes == MAX_TURN_BYTES
    assert len(Message("assistant", "", (ToolCall("f"),) * MAX_TURN_CALLS).tool_calls) == MAX_TURN_CALLS
    assert Message("tool", "7", name=LONG_NAME).name == LONG_NAME
    assert ToolSpec("f", "x" * (MAX_SCHEMA_BYTES - len(NO_ARGUMENTS)), NO_ARGUMENTS).num_bytes == MAX_SCHEMA_BYTES
    assert ToolCall.of("f", {"b": 1, "a": "\N{LATIN SMALL LETTER E WITH ACUTE}"}).values == {"a": "\xe9", "b": 1}


def call_bytes(call):
    """Its name and its arguments."""
    return len(call.name) + len(call.arguments)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: ToolCall(""), r"^a tool call's name '': wanted 1 to 64 printable characters$"),
        (lambda: ToolCall(LONG_NAME + "n"), r"^a tool call's name 'n+'?: wanted"),
        (lambda: ToolCall("a\nb"), r"^a tool call's name 'a\\nb': wanted"),
        (lambda: ToolCall("f", "[1]"), r"^arguments of f: not a JSON object in canonical form$"),
        (lambda: ToolCall("f", '{"a": 1}'), r"^arguments of f: not a JSON object in canonical form$"),
        (lambda: ToolCall("f", '{"a"'), r"^arguments of f: "),
        (lambda: ToolCall.of("f", {"a": {1}}), r"^arguments of f: "),
        (lambda: Message("judge", ""), r"^unknown role 'judge'; wanted one of system, user, assistant, tool$"),
        (lambda: Message("user", "", (CALL,)), r"^a message of role user has tool calls; only assistant messages may$"),
        (lambda: Message("assistant", "", (CALL,) * (MAX_TURN_CALLS + 1)), r"^65 tool calls; at most 64$"),
        (lambda: Message("tool", "", name="\0"), r"^a message's name '\\x00': wanted"),
        (lambda: Message("user", "x" * (MAX_TURN_BYTES + 1)), r"^content of 1,048,577 bytes; at most 1,048,576$"),
        (lambda: Message("user", "\ud800"), r"^the text is not UTF-8: it has an unpaired surrogate$"),
        (lambda: ToolSpec("", "", NO_ARGUMENTS), r"^a tool's name '': wanted"),
        (lambda: ToolSpec("f", "x" * MAX_SCHEMA_BYTES, NO_ARGUMENTS), r"^schema of f: 65,5\d\d bytes; at most 65,536$"),
        (lambda: ToolSpec("f", "", "{"), r"^schema of f: "),
        (lambda: ToolSpec("f", "", "[]"), r"^schema of f: not a JSON schema of type \"object\"$"),
        (lambda: ToolSpec("f", "", '{"type":"array"}'), r"^schema of f: not a JSON schema of type \"object\"$"),
    ],
)
def test_what_is_none_is_said_in_words(make, why):
    """As an environment's error, an agent's refusal or a peer's drop has it."""
    with pytest.raises(RecordError, match=why):
        make()


def test_chat_templates_get_calls_and_answers_in_their_form():
    """Answers are numbered behind each turn that calls; ids have nine characters, as Mistral's templates want it."""
    calls = (CALL, ToolCall("f"), ToolCall("f"))
    answers = (Message("tool", "7", name="look_up"), Message("tool", "8"), Message("tool", "9"))
    turn = Message("assistant", "hm", calls)
    said = [{"role": "tool", "content": "7", "tool_call_id": "call00000", "name": "look_up"}]
    nameless = {"role": "tool", "name": "unknown"}  # templates of Hermes want a name
    said += [nameless | {"content": str(8 + place), "tool_call_id": f"call0000{1 + place}"} for place in range(2)]
    called = {
        "role": "assistant",
        "content": "hm",
        "tool_calls": [
            {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"key": "b"}}},
            {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}},
            {"type": "function", "id": "call00002", "function": {"name": "f", "arguments": {}}},
        ],
    }
    assert as_chat([turn, *answers, turn, *answers]) == [called, *said, called, *said]
    assert as_chat([answers[1]]) == [nameless | {"content": "8", "tool_call_id": "call00000"}]
    described = {"name": "f", "description": "Finds.", "parameters": {"type": "object"}}
    assert ToolSpec("f", "Finds.", NO_ARGUMENTS).as_chat() == {"type": "function", "function": described}


def test_what_is_said_when_all_is_over_is_cut():
    """The first messages, and of each its beginning."""
    told = Message("tool", "x" * (MAX_LAST_CHARS + 1), name="f")
    kept = Message("tool", "x" * MAX_LAST_CHARS, name="f")
    last = EpisodeSegment(num_tokens=9, is_sampled=False, messages=(told,) * (MAX_LAST_MESSAGES + 1))
    assert shortened(last) == EpisodeSegment(num_tokens=0, is_sampled=False, messages=(kept,) * MAX_LAST_MESSAGES)


def test_a_long_conversation_is_read_from_both_its_ends():
    """Whole where a segment has room; else without its middle, and without the rest of long messages."""
    short = [Message("user", str(number)) for number in range(MAX_TURN_MESSAGES)]
    assert conversation_to_read(short) == tuple(short)
    more = [*short, Message("user", "end")]
    half = MAX_TURN_MESSAGES // 2
    assert conversation_to_read(more) == (*more[:half], *more[-half:])
    full = [Message("user", "x" * (MAX_TURN_BYTES // 2))] * 2
    assert conversation_to_read(full) == tuple(full)
    over = [*full, Message("tool", "y" * (MAX_LAST_CHARS + 1), name="f")]
    cut = Message("user", "x" * MAX_LAST_CHARS)
    assert conversation_to_read(over) == (cut, cut, Message("tool", "y" * MAX_LAST_CHARS, name="f"))
