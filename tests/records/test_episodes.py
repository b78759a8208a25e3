"""What crosses of an episode, and what a single answer pays for it."""

import msgspec
import pytest

from mrl.records.codec import decode, decoder, encode
from mrl.records.episodes import EpisodeSegment, Message, ToolCall, as_chat, transcript
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


@pytest.mark.parametrize("place", [0, 1])
def test_answers_of_tools_name_the_calls_before_them(place):
    """In their order, anew with every turn that calls."""
    calling = Message(role="assistant", content="", tool_calls=(CALL, CALL))
    answers = [Message(role="tool", content=str(n), name="look_up") for n in range(2)]

    chat = as_chat([calling, *answers, calling, *answers])

    for turn in (chat[:3], chat[3:]):
        assert turn[0]["tool_calls"][place]["id"] == turn[1 + place]["tool_call_id"]
        assert len(turn[1 + place]["tool_call_id"]) == 9, "as Mistral's templates want it"
    assert chat[0]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"key": "b"}}
