"""Packing changes how rows are laid out and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.forward import ForwardSettings, answer_logprobs
from mrl.learner.packing import deal, fill_bins, pack, row_tokens
from mrl.objectives.specs import Clipped, CrossSequence, Imitation
from mrl.sharing.regime import Component

COMPONENTS = (
    Component("own", Clipped(), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
    Component("shared", CrossSequence(), 1.0, "rows", "peer"),
    Component("pooled", Clipped(base="behaviour"), 1.0, "rows", "peer"),
)
SETTINGS = ForwardSettings(temperature=0.8, chunk_tokens=7)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 80))
def test_bins_hold_every_row_once_within_their_capacity(lengths, capacity):
    """No row is lost or doubled and no bin overflows."""
    bins = fill_bins(lengths, capacity)

    assert sorted(index for rows in bins for index in rows) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in rows) <= capacity for rows in bins)
    assert len(bins) <= 2 * sum(lengths) // capacity + 1


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_packed_rows_equal_separate_rows(tiny_model, make_rows, family):
    """Log-probabilities of packed rows equal those of one plain forward per row."""
    model, rows = tiny_model(family), make_rows(23)
    batch = pack(rows, COMPONENTS, pack_tokens=64, microbatch_tokens=100_000)[0]

    with torch.no_grad():
        packed = answer_logprobs(model, batch, SETTINGS)
        separate = {}
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
            logits = model(ids[None]).logits[0] / SETTINGS.temperature
            start = row.prompt_token_ids.size
            picked = logits.log_softmax(-1)[start - 1 : -1].gather(-1, ids[start:, None]).squeeze(-1)
            separate[row.prompt_id] = picked

    order = [rows[i] for bins in fill_bins([row_tokens(r) for r in rows], 64) for i in bins]
    expected = torch.cat([separate[row.prompt_id] for row in order])
    assert torch.allclose(packed, expected, atol=2e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_rows_without_loss_or_overlap(make_rows, world_size):
    """All ranks together hold every answer token once."""
    rows = make_rows(40)
    shares = [
        pack(rows, COMPONENTS, pack_tokens=32, microbatch_tokens=96, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]

    targets = torch.cat([batch.target_ids_T for share in shares for batch in share])

    expected = np.concatenate([row.answer_token_ids for row in rows])
    assert sorted(targets.tolist()) == sorted(expected.tolist())
    assert all(batch.input_ids_NL.numel() <= 96 for share in shares for batch in share)


def test_every_token_keeps_what_its_row_says(make_rows):
    """Values stay with their tokens; rows without behaviour have 0, without a teacher NaN."""
    rows = make_rows(40, shared=True)

    for batch in pack(rows, COMPONENTS, pack_tokens=32, microbatch_tokens=96):
        for place in batch.row_T.unique().tolist():
            mine, row = (batch.row_T == place).numpy(), rows[place]
            absent = np.full(row.answer_token_ids.size, np.nan, np.float32)
            behaviour = np.nan_to_num(absent) if row.behaviour_logprobs is None else row.behaviour_logprobs
            teacher = absent if row.teacher_logprobs is None else row.teacher_logprobs
            np.testing.assert_array_equal(batch.target_ids_T.numpy()[mine], row.answer_token_ids)
            np.testing.assert_array_equal(batch.advantages_T.numpy()[mine], row.advantages)
            np.testing.assert_array_equal(batch.weights_T.numpy()[mine], row.weights)
            np.testing.assert_array_equal(batch.behaviour_logprobs_T.numpy()[mine], behaviour)
            np.testing.assert_array_equal(batch.teacher_logprobs_T.numpy()[mine], teacher)
            assert {COMPONENTS[index].name for index in batch.component_T[mine].tolist()} == {row.component}


def test_spans_are_numbered_over_all_rows(make_rows):
    """Tokens of one span of one row share a number with no other; without any span there is nothing to number."""
    rows = make_rows(40, shared=True)

    for batch in pack(rows, COMPONENTS, pack_tokens=64, microbatch_tokens=100_000):
        for name, found_T in (("behaviour_spans", batch.behaviour_span_T), ("teacher_spans", batch.teacher_span_T)):
            expected = []
            for place in dict.fromkeys(batch.row_T.tolist()):
                spans = getattr(rows[place], name)
                numbers = range(rows[place].answer_token_ids.size) if spans is None else spans.tolist()
                expected += [(place, number) for number in numbers]
            assert len(set(zip(found_T.tolist(), expected, strict=True))) == len(set(found_T.tolist()))
            assert len(set(found_T.tolist())) == len(set(expected)) < len(expected)
            assert max(found_T.tolist()) < len(expected)
    assert pack(make_rows(8), COMPONENTS, pack_tokens=32, microbatch_tokens=96)[0].behaviour_span_T is None


def test_a_row_longer_than_a_pack_gets_room(make_rows):
    """The packed length grows to the longest row instead of cutting it."""
    rows = make_rows(5, longest=100)

    batch = pack(rows, COMPONENTS, pack_tokens=32, microbatch_tokens=1)[0]

    assert batch.input_ids_NL.shape[1] == max(row_tokens(row) for row in rows)


def test_an_empty_batch_packs_to_nothing():
    """A step without rows has no forward pass."""
    assert pack([], COMPONENTS, pack_tokens=32, microbatch_tokens=32) == []


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 5))
def test_rows_are_dealt_so_that_no_rank_waits_long(lengths, num_ranks):
    """Every row once; the fullest rank has at most one row more than the emptiest."""
    shares = deal(lengths, num_ranks)
    loads = [sum(lengths[index] for index in share) for share in shares]

    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert deal([8, 5, 4, 3], 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("count", [1, 3, 17])
def test_all_ranks_make_the_same_number_of_passes(make_rows, count):
    """A rank without rows, or with fewer, makes passes that hold nothing."""
    options = {"pack_tokens": 32, "microbatch_tokens": 32, "world_size": 4}
    shares = [pack(make_rows(count, shared=True), COMPONENTS, rank=rank, **options) for rank in range(4)]

    assert len({len(share) for share in shares}) == 1
    assert any(len(batch.target_ids_T) == 0 for share in shares for batch in share) or count == 17


def test_a_pass_without_rows_gives_every_parameter_a_gradient_of_zero(tiny_model, make_rows):
    """Nothing is learnt from it, and it takes part in what all ranks do."""
    batch = pack(make_rows(1), COMPONENTS, pack_tokens=32, microbatch_tokens=32, rank=1, world_size=2)[0]
    model = tiny_model()

    answer_logprobs(model, batch, SETTINGS).sum().backward()

    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
