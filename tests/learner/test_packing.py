"""Packing changes how rows are laid out and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.packing import fill_bins, pack, row_tokens
from mrl.learner.step import StepSettings, answer_logprobs
from mrl.sharing.regime import Component

COMPONENTS = (Component("own", "policy_gradient", 1.0, "rows"), Component("rescue", "imitation", 0.3, "rows"))
SETTINGS = StepSettings(
    clip_low=0.2, clip_high=0.2, max_behaviour_weight=5.0, max_grad_norm=1.0, temperature=0.8, chunk_tokens=7
)


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


def test_a_row_longer_than_a_pack_gets_room(make_rows):
    """The packed length grows to the longest row instead of cutting it."""
    rows = make_rows(5, longest=100)

    batch = pack(rows, COMPONENTS, pack_tokens=32, microbatch_tokens=1)[0]

    assert batch.input_ids_NL.shape[1] == max(row_tokens(row) for row in rows)


def test_an_empty_batch_packs_to_nothing():
    """A step without rows has no forward pass."""
    assert pack([], COMPONENTS, pack_tokens=32, microbatch_tokens=32) == []
