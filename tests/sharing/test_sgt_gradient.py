"""The loss that the regime describes, taken by the learner's own code, against the method's formula."""

import numpy as np
import pytest


@pytest.mark.parametrize(("normaliser", "z"), [("rescues", 1), ("prompts", 2)])
def test_gradient_on_failed_groups_is_the_score_of_the_peer_answer(
    make_sgt, make, receiver, lab, step_of, normaliser, z
):
    """All-failed groups have no policy gradient; what is left is (lambda / Z) times the mean score of y*, downhill."""
    model = lab.model()
    regime = make_sgt(lambda_=0.3, normaliser=normaliser)
    groups = [make.group([0, 0, 0, 0], "p"), make.group([0, 0, 0, 0], "q")]
    assert lab.is_zero(lab.gradient(step_of(regime, groups), regime, model))

    absorbed = step_of(regime, groups, [make.success()])
    y = receiver.retokenize(b"reverse: yah", finished=True, max_tokens=64).token_ids
    mean_score = lab.score_of(model, lambda model: model.logprobs(np.array([3]), y).mean())
    lab.assert_same(lab.gradient(absorbed, regime, model), [-(0.3 / z) * score for score in mean_score])


def test_left_out_rows_change_nothing(make_sgt, make, lab, step_of):
    """Uniform groups, whose rows are left out, leave the mean over all rows of the batch as it is."""
    model = lab.model()
    regime = make_sgt()
    own = [make.group([1, 0, 0]), make.group([1, 1, 1]), make.group([0, 0, 0])]
    found = lab.gradient(step_of(regime, own), regime, model, start=model)
    advantages = [2 / np.sqrt(3), -1 / np.sqrt(3), -1 / np.sqrt(3)]

    def slow(model):
        total = 0.0
        for number, advantage in enumerate(advantages):
            ids = np.array([10 + number, 11, 12][: 2 + number % 2])
            log_pi = model.logprobs(np.array([3]), ids)
            weight = (log_pi.detach() - (-0.5 - number)).exp().clamp(max=5.0)
            total = total - advantage * (weight * log_pi).mean() / 9
        return total

    lab.assert_same(found, lab.score_of(model, slow))
