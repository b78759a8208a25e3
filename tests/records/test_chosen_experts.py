"""Experts of answers: as they travel, and as they grow with an answer."""

import numpy as np
import pytest

from mrl.records.chosen_experts import ChosenExperts, GrowingExperts, joined
from mrl.records.codec import decode, decoder, encode

GROWING = np.arange(40, dtype=np.uint8).reshape(10, 4)


@pytest.mark.parametrize(("dtype", "largest", "bytes_each"), [("u1", 255, 1), ("<u2", 256, 2), ("<i4", 7, 1)])
def test_they_come_as_they_went(dtype, largest, bytes_each):
    """In a byte each where that holds them."""
    experts = (np.arange(24) % (largest + 1)).astype(dtype).reshape(4, 6)
    experts[3, 5] = largest

    sent = ChosenExperts.packed(experts)
    received = decode(encode(sent), decoder(ChosenExperts))

    assert len(sent.ids) == 24 * bytes_each
    np.testing.assert_array_equal(received.unpacked(4), experts)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 5, 16])
def test_of_another_number_of_rows_they_are_nothing(num_rows):
    """Rather than those of other tokens."""
    assert ChosenExperts.packed(np.zeros((4, 6), np.uint8)).unpacked(num_rows) is None


def test_parts_of_an_answer_follow_each_other():
    """Each is told with its tokens; an empty one, of a call that was given up at once, is nothing."""
    growing = GrowingExperts(0)
    growing.add(3, GROWING[:3])
    growing.add(0, None)
    growing.add(4, GROWING[3:7])

    assert growing.num_untold == 0
    np.testing.assert_array_equal(growing.joined(), GROWING[:7])


def test_what_is_told_late_is_told_of_all_that_was_untold():
    """A stream tells with its last part, a prompt with its answer; and what stands behind a stop string is left out."""
    growing = GrowingExperts(2)
    growing.add(3, None)
    assert growing.joined() is None
    assert growing.num_untold == 5
    growing.add(1, GROWING[:10])

    np.testing.assert_array_equal(growing.joined(), GROWING[:6])


def test_too_few_are_none():
    """Nobody knows of which tokens they are."""
    growing = GrowingExperts(0)
    growing.add(4, GROWING[:3])

    assert growing.joined() is None
    assert growing.num_untold == 4
    growing = GrowingExperts(0)
    growing.add(3, GROWING[:3])
    growing.add(1, None)
    assert growing.joined() is None, "of a stream that ended at a stop string"


def test_parts_of_two_models_are_not_joined():
    """Nor is anything joined where the experts of one part are not known."""
    assert joined([]) is None
    assert joined([GROWING, None]) is None
    assert joined([GROWING, GROWING[:, :3]]) is None
    np.testing.assert_array_equal(joined([GROWING, GROWING[:1]]), np.concatenate([GROWING, GROWING[:1]]))
