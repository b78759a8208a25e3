"""Bytes to records and back, and the limits on the way."""

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.errors import RecordError
from mrl.records.codec import SCHEMA, decode, decoder, encode, pack_array, unpack_array
from mrl.records.exchange_messages import client_message_decoder, daemon_message_decoder
from mrl.records.experience import MAX_COMPLETION_BYTES, OutcomeRecord, experience_decoder
from mrl.records.host_messages import inbox_decoder
from mrl.records.leases import allocator_reply_decoder, allocator_request_decoder
from mrl.records.rollouts import learner_message_decoder, worker_message_decoder
from mrl.records.version import Version
from tests.support.stored_core import put_message

ALL_DECODERS = [
    allocator_reply_decoder,
    allocator_request_decoder,
    client_message_decoder,
    daemon_message_decoder,
    experience_decoder,
    learner_message_decoder,
    inbox_decoder,
    worker_message_decoder,
]


def outcome(**changes):
    """A small outcome record."""
    fields = {
        "record_id": "qwen:0.3:7:0",
        "source": "qwen",
        "oldest": Version(0, 3),
        "newest": Version(0, 4),
        "fingerprint": "f" * 16,
        "prompt_id": "spell_backward:12",
        "task": "spell_backward",
        "created_unix_s": 1.7e9,
        "completion": b"reverse: \xff yah",
        "finish_reason": "stop",
        "verifier": "spell_backward",
        "reward": 1.0,
    }
    return OutcomeRecord(**(fields | changes))


def as_map(**changes):
    """The same record as a plain map, with changes."""
    return msgpack.unpackb(encode(outcome())) | changes


def test_a_record_comes_back_equal():
    """Encoding and decoding is the identity, also for bytes that are no text."""
    assert decode(encode(outcome()), experience_decoder) == outcome()


def test_plain_msgpack_reads_a_record():
    """A reader without mrl sees a map with names, a type tag and raw bytes."""
    content = msgpack.unpackb(encode(put_message(outcome(), seq=5)))
    assert (content["type"], content["seq"]) == ("put", 5)
    [record] = content["records"]
    assert record["type"] == "outcome"
    assert record["completion"] == b"reverse: \xff yah"
    assert record["oldest"] == {"run_epoch": 0, "step": 3}
    assert record["schema"] == SCHEMA


def test_plain_msgpack_writes_a_record():
    """What another program packs as a map is a record."""
    assert decode(msgpack.packb(as_map()), experience_decoder) == outcome()


def test_fields_of_a_newer_writer_are_ignored():
    """An appended field does not disturb an older reader."""
    assert decode(msgpack.packb(as_map(colour="red")), experience_decoder) == outcome()


def test_fields_that_an_older_writer_lacks_take_their_default():
    """A record without an appended field is read with that field's default."""

    class Newer(OutcomeRecord, frozen=True, kw_only=True, tag="outcome"):
        tries: int = 1

    newer = decode(encode(outcome()), decoder(Newer))
    assert (newer.tries, newer.completion) == (1, outcome().completion)


@pytest.mark.parametrize("schema", [0, SCHEMA + 1])
def test_another_schema_is_refused(schema):
    """A changed meaning has another number, and is not guessed at."""
    with pytest.raises(RecordError, match="schema"):
        decode(msgpack.packb(as_map(schema=schema)), experience_decoder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": "much"}, r"\$\.reward"),
        ({"reward": float("nan")}, r"\$\.reward"),
        ({"reward": 1e8}, r"\$\.reward"),
        ({"record_id": ""}, r"\$\.record_id"),
        ({"record_id": "x" * 201}, r"\$\.record_id"),
        ({"oldest": {"run_epoch": 0, "step": -1}}, r"\$\.oldest\.step"),
        ({"newest": {"run_epoch": 0}}, "step"),
        ({"completion": bytes(MAX_COMPLETION_BYTES + 1)}, r"\$\.completion"),
        ({"finish_reason": "eos"}, r"\$\.finish_reason"),
        ({"type": "pickle"}, r"type"),
    ],
)
def test_an_error_names_the_field(changes, field):
    """Whoever reads the error knows what to look at."""
    with pytest.raises(RecordError, match=field):
        decode(msgpack.packb(as_map(**changes)), experience_decoder)


def test_a_missing_field_is_named():
    """So does a map that lacks something."""
    content = as_map()
    del content["prompt_id"]
    with pytest.raises(RecordError, match="prompt_id"):
        decode(msgpack.packb(content), experience_decoder)


def test_an_error_names_the_place_in_a_list():
    """The index of the bad record is part of the path."""
    with pytest.raises(RecordError, match=r"\$\.requests\[1\]|\$\.requests\[\.\.\.\]"):
        decode(msgpack.packb({"type": "done", "client": "w", "requests": ["a", None]}), client_message_decoder)


def test_too_many_records_in_one_message_are_refused():
    """Lists are bounded."""
    message = {"type": "done", "client": "w", "requests": ["a"] * 4097}
    with pytest.raises(RecordError, match="requests"):
        decode(msgpack.packb(message), client_message_decoder)


def test_oversize_is_refused_before_decoding():
    """The limit holds for the bytes as they came."""
    body = encode(outcome())
    with pytest.raises(RecordError, match=f"{len(body)} bytes exceeds the limit of 100 bytes"):
        decode(body, experience_decoder, max_bytes=100)


@pytest.mark.parametrize(
    "bomb",
    [b"\x80" * 100_000, b"\x90" * 100_000, b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b""],
)
@pytest.mark.parametrize("using", ALL_DECODERS)
def test_bombs_are_refused(bomb, using):
    """Nested, endless and empty messages are refused at once."""
    with pytest.raises(RecordError):
        decode(bomb, using)


@given(body=st.binary(max_size=300))
@pytest.mark.parametrize("using", ALL_DECODERS)
def test_random_bytes_raise_nothing_but_record_error(using, body):
    """Garbage is either a record or a RecordError."""
    try:
        assert isinstance(decode(body, using), msgspec.Struct)
    except RecordError:
        return


@given(position=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_changed_byte_raises_nothing_but_record_error(position, value):
    """Nor does a valid message with one byte changed, or cut short."""
    body = bytearray(encode(put_message(outcome(), outcome(), seq=5)))
    body[position % len(body)] = value
    for damaged in (bytes(body), bytes(body[: position % len(body)])):
        try:
            assert isinstance(decode(damaged, client_message_decoder), msgspec.Struct)
        except RecordError:
            continue


@pytest.mark.parametrize("dtype", ["i4", "f4", "u1"])
def test_an_array_comes_back_equal_little_endian_and_read_only(dtype):
    """Arrays travel as raw little-endian bytes."""
    values = np.array([1, 2, 200], dtype=dtype)
    back = unpack_array(pack_array(values, dtype), dtype)
    np.testing.assert_array_equal(back, values)
    assert not back.flags.writeable
    assert pack_array([1], "i4") == b"\x01\x00\x00\x00"


def test_a_torn_array_is_refused():
    """Five bytes are no whole number of int32."""
    with pytest.raises(RecordError, match="5 bytes"):
        unpack_array(bytes(5), "i4")
