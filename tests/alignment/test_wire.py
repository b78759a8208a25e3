"""What comes from elsewhere: any fields give a checked answer or a reason, and nothing raises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.peer_answer import PeerAnswer, bare_text, validate
from mrl.alignment.translate import translate_batch
from mrl.records.finish import FinishReason

TRUE = {
    "completion": b"yah",
    "byte_lengths": np.array([2, 1, 0], dtype=np.int32),
    "logprobs": np.array([-0.5, -0.1, -0.02], dtype=np.float32),
    "special": np.array([False, False, True]),
    "finish_reason": FinishReason.STOP,
    "fingerprint": "peer",
}


class Tagged(np.ndarray):
    """An array of a subclass."""


def masked(values) -> np.ma.MaskedArray:
    return np.ma.array(values, mask=[True, False, False])


@pytest.mark.parametrize(
    "lie",
    [
        {"byte_lengths": masked(TRUE["byte_lengths"])},
        {"logprobs": masked(TRUE["logprobs"])},
        {"special": masked(TRUE["special"])},
        {"token_ids": masked(TRUE["byte_lengths"])},
        {"byte_lengths": np.ma.masked_all(3, dtype=np.int32)},
        {"logprobs": TRUE["logprobs"].view(Tagged)},
        {"special": np.array([0, 0, 256])},
        {"special": np.array([256, 0, 1])},
        {"special": np.array([0, -255, 1])},
        {"special": b"\0\0\2"},
        {"byte_lengths": np.array([2, 1, 2**32])},
        {"token_ids": np.array([2**63, 1, 2], dtype=np.uint64)},
        {"byte_lengths": TRUE["byte_lengths"].astype(object)},
        {"logprobs": b"abc"},
        {"traced": 1},
    ],
    ids=str,
)
def test_fields_of_another_kind_are_no_answer(lie):
    """A value that a conversion would hide, wrap or round is refused with "type"."""
    assert isinstance(validate(**TRUE), PeerAnswer)
    assert validate(**TRUE | lie) == Rejected("type")


@pytest.mark.parametrize("reason", FinishReason)
def test_only_an_answer_that_stopped_has_an_end(receiver_of, reason):
    """On the wire the reason is a word; a special last token of an answer that was cut or given up ends nothing."""
    told = validate(**validate(**TRUE | {"finish_reason": str(reason)}).fields())
    assert told.finish_reason is reason
    assert told.finished == told.ends_with_eos == (reason == "stop")
    receiver = receiver_of("metaspace")
    row = translate_batch([told], receiver, max_tokens=9).row(0)
    assert (row.token_ids[-1] == receiver.eos_id) == (reason == "stop")
    assert bool(row.flags & Flag.TAIL) == (reason != "stop")


@pytest.mark.parametrize("reason", ["", "eos", "STOP", b"stop", None, 0, True])
def test_another_reason_is_no_answer(reason):
    """The set is closed."""
    assert validate(**TRUE | {"finish_reason": reason}) == Rejected("type")


def test_a_bare_text_survives_the_wire():
    """What has no trace says so on the other side."""
    for finished in (False, True):
        answer = validate(**bare_text(b"yah", finished=finished).fields())
        assert isinstance(answer, PeerAnswer)
        assert not answer.traced
        assert answer.ends_with_eos == finished
        assert answer.byte_lengths.tolist() == [3, 0][: 1 + finished]
    assert validate(**TRUE).traced


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=24)
arrays = numpy_st.arrays(
    numpy_st.scalar_dtypes() | numpy_st.unicode_string_dtypes(max_len=3), numpy_st.array_shapes(min_dims=0, min_side=0)
)
numbers = numpy_st.arrays(
    st.sampled_from([np.int8, np.int64, np.uint64, np.float16, np.float64, np.longdouble, ">i4", ">f4", bool]),
    st.just(3) | numpy_st.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
views = st.one_of(
    numbers.map(np.ma.asarray),
    numbers.map(lambda array: array.view(Tagged)),
    st.binary(max_size=24).map(bytearray),
    st.binary(max_size=24).map(memoryview),
    st.lists(st.integers(-2, 3), max_size=4),
    st.sampled_from([object(), validate, np.float32(1), np.datetime64("NaT"), np.zeros(3, dtype=[("a", "i4")])]),
)
odd = scalars | arrays | numbers | views


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*TRUE, "token_ids", "noncanonical", "traced"]), odd, max_size=4))
def test_validate_never_raises(fields):
    """Whatever the fields are, the result is an answer with sound fields or a reason."""
    answer = validate(**TRUE | fields)
    if isinstance(answer, Rejected):
        return
    assert answer.byte_lengths.shape == answer.logprobs.shape == answer.special.shape == (len(answer.special),)
    assert [array.dtype for array in (answer.byte_lengths, answer.logprobs, answer.special)] == ["=i4", "=f4", bool]
    assert answer.byte_lengths.sum() == len(answer.completion)
    assert np.isfinite(answer.logprobs).all()
