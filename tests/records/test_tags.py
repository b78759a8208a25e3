"""Tags say of a record what the record says of itself, for writers of today and of tomorrow."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.records.codec import SCHEMA, encode
from mrl.records.experience import GivenAnswer, OutcomeRecord, ScoreRecord, ScoreRequestRecord, ValueRecord, kind_of
from mrl.records.finish import FinishReason
from mrl.records.tags import Tags, tags_of
from mrl.records.version import Version

COMMON = {
    "record_id": "r", "source": "qwen", "oldest": Version(0, 2), "newest": Version(0, 3), "fingerprint": "f",
    "prompt_id": "p", "task": "t", "created_unix_s": 0.0,
}  # fmt: skip
RECORDS = [
    OutcomeRecord(**COMMON, completion=b"yah", finish_reason=FinishReason.STOP, verifier="v", reward=1.0),
    ValueRecord(**COMMON, rewards=[1.0]),
    ScoreRequestRecord(
        **COMMON, scorer="teacher", answers=[GivenAnswer(completion=b"", finish_reason=FinishReason.STOP)]
    ),
    ScoreRecord(**COMMON, request_id="q", receiver="llama", scores=[None]),
]


def changed(record, **changes):
    """The wire form of a record, changed."""
    return msgpack.packb(msgpack.unpackb(encode(record)) | changes)


@pytest.mark.parametrize("record", RECORDS, ids=kind_of)
def test_tags_repeat_the_record(record):
    """Field by field, and the addressee is the policy that the type names."""
    tags = tags_of(encode(record))
    assert tags is not None
    assert tags.type == kind_of(record)
    for name in ("record_id", "source", "oldest", "newest", "prompt_id", "task", "schema"):
        assert getattr(tags, name) == getattr(record, name)
    addressee = {"score_request": "teacher", "score": "llama"}.get(tags.type, "")
    assert tags.addressee == addressee
    assert [tags.is_for(policy) for policy in ("teacher", "llama")] == [
        addressee in ("", policy) for policy in ("teacher", "llama")
    ]


@pytest.mark.parametrize("record", RECORDS, ids=kind_of)
def test_a_newer_writer_is_understood(record):
    """Fields that this reader does not know are passed over, whatever they hold."""
    body = changed(record, added_later={"deeply": [1, {"nested": b"x" * 1000}]}, another=None)
    assert tags_of(body) == tags_of(encode(record))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": SCHEMA + 1},
        {"schema": SCHEMA - 1},
        {"type": "invented"},
        {"source": ""},
        {"prompt_id": "x" * 201},
        {"oldest": {"run_epoch": -1, "step": 0}},
        {"record_id": 7},
    ],
)
def test_what_is_out_of_bounds_has_no_tags(changes):
    """It is no record to the exchange."""
    assert tags_of(changed(RECORDS[0], **changes)) is None


@pytest.mark.parametrize(
    ("record", "field"), [(RECORDS[2], "scorer"), (RECORDS[3], "request_id"), (RECORDS[3], "receiver")]
)
def test_a_type_needs_its_addressee(record, field):
    """Nobody could be given the record."""
    content = msgpack.unpackb(encode(record))
    assert tags_of(msgpack.packb(content | {field: ""})) is None
    del content[field]
    assert tags_of(msgpack.packb(content)) is None


@given(position=st.integers(0, 500), value=st.integers(0, 255))
def test_a_changed_or_cut_record_raises_nothing(position, value):
    """It has tags or it has none."""
    body = bytearray(encode(RECORDS[2]))
    body[position % len(body)] = value
    for damaged in (bytes(body), bytes(body[: position % len(body)]), b"\x91" * 100_000):
        assert isinstance(tags_of(damaged), Tags | None)
