"""A synchronous run is the same run, whether its learners live on one host or each of them on two."""

import check_layouts
import pytest
import torch

from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.training_state import saved_weights
from tests.support.spread_learners import SPREAD, launch

pytestmark = [pytest.mark.system, pytest.mark.slow]
POLICIES = ("qwen", "llama")
SYNC = ["--run.sync=true", "--run.sync_timeout_s=240"]
STEPS = 5
SAMPLED = ("reward/", "groups/", "sharing/", "tokens/")
"""Names of what is decided by the tokens that were sampled, and by which of them are trained on."""
REPEATED = ("groups/repeated", "groups/granted_again")
"""Names of what a message that was sent twice decides."""


def weights_of(run, policy: str, step: int) -> dict[str, torch.Tensor]:
    """What it has trained, whole, from whichever ranks have written it."""
    return dict(saved_weights(CheckpointStore(run.folder / "checkpoints" / policy, policy).open(step)))


def sampled(run, policy: str) -> dict[int, dict[str, float]]:
    """Step -> what its learner said about the answers that it trained on."""
    return {
        record["step"]: {
            name: value
            for name, value in record["values"].items()
            if name.startswith(SAMPLED) and not name.startswith(REPEATED)
        }
        for record in run.metrics(f"learner/{policy}")
    }


def test_two_learners_over_two_hosts_train_what_they_train_on_one(make_run, namespaces):
    """Four ranks of one policy in shards and two of the other, which share successes, against one rank each.

    Both runs train on the same answers in every step, and their parameters agree to 1e-5.
    """
    alone, spread = make_run(steps=STEPS, name="alone"), make_run(steps=STEPS, name="spread")
    alone.start(*SYNC)
    assert alone.finish() == 0, alone.tail()
    launch(spread, namespaces, *SYNC, *SPREAD)
    assert spread.finish() == 0, spread.tail()

    for policy in POLICIES:
        said, expected = sampled(spread, policy), sampled(alone, policy)
        assert sorted(expected) == list(range(1, STEPS + 1))
        assert said == expected
        first, last = (weights_of(alone, policy, step) for step in (4, STEPS))
        assert check_layouts.difference(first, last) > 1e-4, "it has learnt"
        assert check_layouts.difference(weights_of(spread, policy, STEPS), last) <= 1e-5, policy
    assert sum(values["sharing/asked_prompts"] for values in sampled(alone, "qwen").values()) > 0
