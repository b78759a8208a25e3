"""What the exchange reads of a record, and what it reads for people."""

import msgpack
import pytest

from mrl.records.codec import encode
from mrl.records.experience import (
    GivenAnswer,
    OutcomeRecord,
    RolloutRecord,
    ScoreRecord,
    ScoreRequestRecord,
    SharedAnswer,
    ValueRecord,
    kind_of,
)
from mrl.records.finish import FinishReason
from mrl.records.tags import mean_reward_of, tags_of
from mrl.records.version import Version

COMMON = {
    "record_id": "r", "source": "qwen", "oldest": Version(0, 1), "newest": Version(0, 2), "fingerprint": "f",
    "prompt_id": "p", "task": "t", "created_unix_s": 0.0,
}  # fmt: skip
STOP = FinishReason.STOP
ANSWERS = [SharedAnswer(completion=b"a", finish_reason=STOP, reward=reward, advantage=0.0) for reward in (0.0, 1.0)]
REWARDED = [
    (OutcomeRecord(**COMMON, completion=b"a", finish_reason=STOP, verifier="v", reward=0.75), 0.75),
    (RolloutRecord(**COMMON, answers=ANSWERS), 0.5),
    (ValueRecord(**COMMON, rewards=[1.0, 0.0, 0.0, 0.0]), 0.25),
    (ScoreRequestRecord(**COMMON, scorer="x", answers=[GivenAnswer(completion=b"a", finish_reason=STOP)]), None),
    (ScoreRecord(**COMMON, request_id="q", receiver="x", scores=[None]), None),
]


@pytest.mark.parametrize(("record", "reward"), REWARDED, ids=lambda value: getattr(value, "task", None) and "")
def test_tags_and_rewards_are_read_of_every_type(record, reward):
    """The mean over all answers; a request and a score have none."""
    body = encode(record)
    tags = tags_of(body)
    assert (tags.type, tags.record_id, tags.oldest, tags.newest) == (kind_of(record), "r", Version(0, 1), Version(0, 2))
    assert mean_reward_of(body) == reward


def test_what_cannot_be_read_has_neither():
    """A reward of another type costs the reward alone: a receiver checks the record."""
    good = msgpack.unpackb(encode(REWARDED[0][0]))
    assert tags_of(msgpack.packb(good | {"reward": "high"})) is not None
    assert mean_reward_of(msgpack.packb(good | {"reward": "high"})) is None
    assert tags_of(msgpack.packb(good | {"schema": 1})) is None
    assert tags_of(msgpack.packb(good | {"type": "score", "request_id": "q"})) is None
    assert tags_of(b"") is None
