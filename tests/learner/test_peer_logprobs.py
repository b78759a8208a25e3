"""Log-probs of what peers wrote or scored, read off the training pass."""

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import LearnerTable
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.objectives.specs import Clipped, CrossSequence, Imitation
from mrl.sharing.regime import Component

COMPONENTS = (
    Component("own", Clipped(), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "prompts", "peer"),
    Component("shared", CrossSequence(), 1.0, "rows", "peer"),
    Component("pooled", Clipped(base="behaviour"), 1.0, "rows", "peer"),
)


def train(model, rows, **settings) -> Trainer:
    table = LearnerTable.model_validate({"lr": 1e-30, **settings})
    trainer = Trainer(
        model, table, COMPONENTS, temperature=0.8, seed=0, total_steps=10, world=World(0, 1, torch.device("cpu"))
    )
    trainer.train(StepOrder(rows, {"own": 8.0, "rescue": 2.0, "shared": 3.0, "pooled": 3.0}), 0)
    return trainer


@pytest.mark.parametrize("settings", [{}, {"minibatches": 3}, {"microbatch_tokens": 48}], ids=str)
def test_every_row_that_a_peer_wrote_or_scored_has_its_log_probs(tiny_model, make_rows, settings):
    """However rows are packed and dealt out, each place holds what the model gives to that row."""
    rows, model = make_rows(21, shared=True), tiny_model()
    found = train(model, rows, **settings).peer_logprobs
    scored = {place for place, row in enumerate(rows) if row.teacher_logprobs is not None}
    assert 0 < len(scored) < len(rows)
    assert set(found) == scored | {place for place, row in enumerate(rows) if row.source == "peer"}
    model.eval()
    for place, logprobs in found.items():
        row = rows[place]
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.answer_token_ids]).astype(np.int64))
        with torch.no_grad():
            table = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)
        start = row.prompt_token_ids.size
        expected = [float(table[start + t - 1, ids[start + t]]) for t in range(row.answer_token_ids.size)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_a_step_without_peers_has_none(tiny_model, make_rows):
    """Nothing is gathered where no peer had a part."""
    assert train(tiny_model(), [row for row in make_rows(9) if row.source == "me"]).peer_logprobs == {}
