"""The order of a step crosses ranks whole, and is dealt into minibatches."""

from dataclasses import fields, replace

import numpy as np
import pytest

from mrl.alignment.next_units import NextUnits
from mrl.learner.step_order import StepOrder, decode_order, encode_order, split_minibatches


def order(rows, expansion: float = 1.0) -> StepOrder:
    return StepOrder(rows, {"own": 12.0, "rescue": 3.0, "shared": 5.0, "pooled": 2.0}, expansion)


def test_an_order_crosses_ranks_unchanged(make_rows):
    """Every field of every row survives the broadcast, absent arrays and NaN included."""
    rows = make_rows(17, shared=True)
    rows[3] = replace(rows[3], is_trained=np.arange(rows[3].answer_token_ids.size) % 2 == 0)
    rows[4] = replace(rows[4], row_starts=np.array([1, 3], dtype=np.int32))
    size = rows[5].num_trained_tokens
    told = np.array([[0.5, np.nan]] * size, np.float32)
    rows[5] = replace(rows[5], teacher_units=NextUnits(np.arange(2 * size, dtype=np.int32).reshape(size, 2), told))
    sent = order(rows, 1.5)

    received = decode_order(encode_order(sent))

    assert (received.denominators, received.expansion) == (sent.denominators, 1.5)
    for a, b in zip(sent.examples, received.examples, strict=True):
        for field in fields(a):
            if field.name != "teacher_units":
                np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))
    assert [row.teacher_units is not None for row in received.examples] == [n == 5 for n in range(17)]
    np.testing.assert_array_equal(received.examples[5].teacher_units.token_ids, rows[5].teacher_units.token_ids)
    np.testing.assert_array_equal(received.examples[5].teacher_units.logprobs, told)
    absent = {row.teacher_logprobs is None for row in received.examples}
    assert absent == {True, False}
    assert any(row.behaviour_logprobs is None for row in received.examples)


def test_minibatches_hold_every_row_once_and_share_the_denominators(make_rows):
    """Dealing rows into minibatches keeps all of them, in a new order and in parts of equal size."""
    step = order(make_rows(11))

    parts = split_minibatches(step, 3, np.random.default_rng(0))

    names = [row.prompt_id for part in parts for row in part.examples]
    assert sorted(names) == sorted(row.prompt_id for row in step.examples)
    assert names != [row.prompt_id for row in step.examples]
    assert [len(part.examples) for part in parts] == [3, 4, 4]
    assert all(part.denominators == {"own": 4.0, "rescue": 1.0, "shared": 5 / 3, "pooled": 2 / 3} for part in parts)


def test_lower_phases_come_first_and_are_shuffled_inside(make_rows):
    """Rows of a peer with a higher phase stand last, whatever the seed."""
    rows = [replace(row, phase=index % 3) for index, row in enumerate(make_rows(30))]

    orders = []
    for seed in range(3):
        parts = split_minibatches(order(rows), 3, np.random.default_rng(seed))
        assert [{row.phase for row in part.examples} for part in parts] == [{0}, {1}, {2}]
        orders.append([row.prompt_id for part in parts for row in part.examples])

    assert len({tuple(names) for names in orders}) == 3


@pytest.mark.parametrize(
    ("minibatches", "expansion", "expected"), [(2, 2.0, 4), (4, 1.1, 4), (3, 1.5, 4), (1, 2.0, 2), (2, 0.1, 1)]
)
def test_a_larger_batch_has_more_updates(make_rows, minibatches, expansion, expected):
    """Minibatches times expansion, rounded, and at least one; each takes its share of the denominators."""
    parts = split_minibatches(order(make_rows(16), expansion), minibatches, np.random.default_rng(0))

    assert len(parts) == expected
    assert all(part.denominators["own"] == 12.0 / expected for part in parts)


def test_one_minibatch_keeps_the_order(make_rows):
    """Nothing is shuffled where nothing is split."""
    step = order(make_rows(5))

    assert split_minibatches(step, 1, np.random.default_rng(0)) == [step]
