"""Every type of record: there and back, its kind, and the limits of what is new in it."""

from typing import get_args

import msgpack
import pytest
from msgspec import structs

from mrl.errors import RecordError
from mrl.records.codec import decode, encode, pack_array, unpack_array
from mrl.records.episodes import MAX_SEGMENTS, Message, ToolCall
from mrl.records.exchange_messages import Subscribe, client_message_decoder
from mrl.records.experience import (
    MAX_GROUP,
    EpisodeRecord,
    ExperienceRecord,
    GivenAnswer,
    OutcomeRecord,
    RecordKind,
    RolloutRecord,
    ScoreRecord,
    ScoreRequestRecord,
    SharedAnswer,
    SharedTurn,
    TokenTrace,
    TracedTurn,
    ValueRecord,
    VoteRecord,
    experience_decoder,
    kind_of,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from tests.support.stored_core import put_message

TAGS = {
    "record_id": "qwen:0.3:7", "source": "qwen", "oldest": Version(0, 3), "newest": Version(0, 4), "fingerprint": "f",
    "prompt_id": "spell_backward:12", "task": "spell_backward", "created_unix_s": 1.7e9,
}  # fmt: skip
TRACE = TokenTrace(
    byte_lengths=pack_array([3, 0], "i4"), logprobs=pack_array([-0.5, -2.0], "f4"), special=pack_array([0, 1], "u1"),
    token_ids=pack_array([17, 2], "i4"),
)  # fmt: skip
CALL = ToolCall(name="guess", arguments='{"number":4}')
RECORDS = {
    "outcome": OutcomeRecord(
        **TAGS, completion=b"yah", finish_reason=FinishReason.STOP, verifier="v", reward=1.0, trace=TRACE
    ),
    "episode": EpisodeRecord(
        **TAGS,
        turns=[
            SharedTurn(is_sampled=True, messages=(Message(role="assistant", content="4", tool_calls=(CALL,)),)),
            SharedTurn(is_sampled=False, messages=(Message(role="tool", content="higher", name="guess"),)),
        ],
        verifier="v",
        reward=1.0,
    ),
    "rollout": RolloutRecord(
        **TAGS,
        answers=[
            SharedAnswer(completion=b"yah", finish_reason=FinishReason.STOP, reward=1.0, advantage=0.5, trace=TRACE),
            SharedAnswer(completion=b"\xff", finish_reason=FinishReason.LENGTH, reward=0.0, advantage=-0.5),
            SharedAnswer(
                completion=b"",
                finish_reason=FinishReason.STOP,
                reward=0.0,
                advantage=-0.5,
                turns=[
                    TracedTurn(
                        is_sampled=True,
                        messages=(Message(role="assistant", content="4", tool_calls=(CALL,)),),
                        trace=structs.replace(TRACE, written=b"digest"),
                    ),
                    TracedTurn(is_sampled=False, messages=(Message(role="tool", content="higher", name="guess"),)),
                ],
            ),
        ],
    ),
    "value": ValueRecord(**TAGS, rewards=[0.0, 1.0, 0.5]),
    "vote": VoteRecord(**TAGS, choices=["0123456789abcdef", "", "0123456789abcdef"]),
    "score_request": ScoreRequestRecord(
        **TAGS, scorer="llama", answers=[GivenAnswer(completion=b"yah", finish_reason=FinishReason.STOP)]
    ),
    "score": ScoreRecord(**TAGS, request_id="q", receiver="llama", scores=[TRACE, None]),
}


def test_every_type_has_an_example_here():
    """A type that is added to the union is added to the kinds and to this table."""
    assert {type(record) for record in RECORDS.values()} == set(get_args(ExperienceRecord))
    assert set(RECORDS) == set(get_args(RecordKind))


@pytest.mark.parametrize("kind", RECORDS)
def test_every_type_comes_back_equal(kind):
    """Alone and inside a message, and `kind_of` names it as the wire does."""
    record = RECORDS[kind]
    assert decode(encode(record), experience_decoder) == record
    [raw] = decode(encode(put_message(record)), client_message_decoder).records
    assert decode(bytes(raw), experience_decoder) == record
    assert kind_of(record) == msgpack.unpackb(encode(record))["type"] == kind


def changed(kind, **changes):
    """The wire form of an example, changed."""
    return msgpack.packb(msgpack.unpackb(encode(RECORDS[kind])) | changes)


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("rollout", {"answers": []}, r"\$\.answers"),
        ("value", {"rewards": []}, r"\$\.rewards"),
        ("value", {"rewards": [0.0] * (MAX_GROUP + 1)}, r"\$\.rewards"),
        ("value", {"rewards": [float("nan")]}, r"\$\.rewards\["),
        ("value", {"rewards": [1e8]}, r"\$\.rewards\["),
        ("vote", {"choices": []}, r"\$\.choices"),
        ("vote", {"choices": ["a"] * (MAX_GROUP + 1)}, r"\$\.choices"),
        ("vote", {"choices": ["x" * 17]}, r"\$\.choices\["),
        ("vote", {"choices": [1]}, r"\$\.choices\["),
        ("score_request", {"scorer": ""}, r"\$\.scorer"),
        (
            "score_request",
            {"answers": [{"completion": b"", "finish_reason": "eos"}]},
            r"\$\.answers\[.+\]\.finish_reason",
        ),
        ("score", {"scores": []}, r"\$\.scores"),
        ("score", {"receiver": "x" * 201}, r"\$\.receiver"),
    ],
)
def test_groups_and_names_are_bounded(kind, changes, field):
    """A group without answers, or one of thousands, is no group; the error names the field."""
    with pytest.raises(RecordError, match=field):
        decode(changed(kind, **changes), experience_decoder)


TOO_LONG_DIGEST = {"byte_lengths": b"", "logprobs": b"", "special": b"", "written": b"x" * 17}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"turns": [{"is_sampled": False, "messages": []}] * (MAX_SEGMENTS + 1)}, r"turns"),
        ({"turns": [{"is_sampled": True, "messages": [], "trace": TOO_LONG_DIGEST}]}, r"written"),
        ({"turns": [{"is_sampled": True, "messages": [{"role": "king", "content": ""}]}]}, r"role"),
        ({"turns": [{"is_sampled": True, "messages": [], "trace": {"byte_lengths": b""}}]}, r"trace"),
    ],
)
def test_turns_of_a_group_are_bounded(changes, field):
    """In their number, their digests, their messages and their traces."""
    answers = [msgpack.unpackb(encode(one)) for one in RECORDS["rollout"].answers]
    with pytest.raises(RecordError, match=field):
        decode(changed("rollout", answers=[answers[0] | changes]), experience_decoder)


def test_an_answer_of_one_turn_has_the_keys_that_it_always_had():
    """It costs no byte for what episodes need."""
    answer = msgpack.unpackb(encode(RECORDS["rollout"].answers[0]))
    assert list(answer) == ["completion", "finish_reason", "reward", "advantage", "trace"]


def test_a_trace_without_ids_is_one_of_an_older_writer():
    """Ids were added later and may lack."""
    trace = msgpack.unpackb(encode(TRACE))
    del trace["token_ids"]
    record = decode(changed("outcome", trace=trace), experience_decoder)
    assert record.trace.token_ids is None
    assert unpack_array(record.trace.logprobs, "f4").tolist() == [-0.5, -2.0]


def test_a_question_without_kinds_is_one_for_successes():
    """As older clients ask; an unknown kind is refused, and so is a question for nothing."""
    question = {"type": "fetch", "client": "l", "policy": "p", "prompt_ids": ["p"], "limit": 1,
                "max_age_versions": None, "watch": False}  # fmt: skip
    assert decode(msgpack.packb(question), client_message_decoder).kinds == ["outcome"]
    for kinds in ([], ["pickle"]):
        with pytest.raises(RecordError, match="kinds"):
            decode(msgpack.packb(question | {"kinds": kinds}), client_message_decoder)


def test_only_requests_can_be_subscribed_to():
    """A success belongs to all who ask for it, and not to the first."""
    subscribe = Subscribe(client="e", kinds=["score_request"])
    assert decode(encode(subscribe), client_message_decoder) == subscribe
    with pytest.raises(RecordError, match="kinds"):
        decode(encode(Subscribe(client="e", kinds=["outcome"])), client_message_decoder)
