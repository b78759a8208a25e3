"""What the tool that measures losses takes for a life that trains, and for the ranks of a learner."""

from argparse import ArgumentTypeError

import pytest
from measure_losses import has_trained, losses_of, ranks_of


@pytest.mark.parametrize(
    ("versions", "trains"),
    [
        ([(0, 4), (0, 5)], False),
        ([(0, 5), (1, 5)], False),
        ([(0, 5), (1, 5), (1, 6)], True),
        ([(1, 5), (2, 5)], False),
    ],
    ids=["the life before", "begun", "a step more", "begun twice"],
)
def test_a_life_trains_when_it_publishes_more_than_it_began_with(versions, trains):
    """What it publishes first is what its checkpoint had."""
    assert has_trained(versions, after_epoch=0) is trains


def test_the_ranks_of_a_learner_are_known_by_their_titles():
    """Not those of a policy whose name begins alike."""
    pids = {"learner/a": 1, "learner/a/rank1": 2, "learner/ab": 3, "worker/a/0": 4}
    assert ranks_of("a", pids) == {"learner/a": 1, "learner/a/rank1": 2}


@pytest.mark.parametrize("words", ["rnak", "rank,cut-", "cut-1.5", ""])
def test_a_loss_that_there_is_none_of_is_refused(words):
    """Before anything is started."""
    assert losses_of("rank,cut-10,for-good") == ["rank", "cut-10", "for-good"]
    with pytest.raises(
        ArgumentTypeError, match=r"^there is no loss '.*'; wanted first, rank, agent, host, cut-SECONDS"
    ):
        losses_of(words)
