"""The loss that the regime describes, taken by the learner's own code, against the method's formula."""

import numpy as np
import pytest
import torch

from tests.support.retokenizing import retokenize


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
    y = retokenize(receiver, b"reverse: yah", finished=True, max_tokens=64).token_ids
    mean_score = lab.score_of(model, lambda model: model.logprobs(np.array([3]), y).mean())
    lab.assert_same(lab.gradient(absorbed, regime, model), [-(0.3 / z) * score for score in mean_score])


def test_gradient_of_rescues_whose_tokens_count_alike(make_sgt, make, receiver, lab, step_of):
    """By "tokens" a long rescue weighs more than a short one."""
    model = lab.model()
    regime = make_sgt(lambda_=0.3, normaliser="tokens")
    texts = {"p": b"reverse: yah", "q": b"zz"}
    groups = [make.group([0, 0], prompt_id) for prompt_id in texts]
    absorbed = step_of(regime, groups, [make.success(text, prompt_id) for prompt_id, text in texts.items()])

    def slow(model):
        total, num_tokens = 0.0, 0
        for text in texts.values():
            ids = retokenize(receiver, text, finished=True, max_tokens=64).token_ids
            total = total - model.logprobs(np.array([3]), ids).sum()
            num_tokens += len(ids)
        return 0.3 * total / num_tokens

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))


@pytest.mark.parametrize("kl", [None, 0.1])
def test_without_a_rescue_the_gradient_is_that_of_grpo_bit_for_bit(
    make_context, build, make, receiver, lab, step_of, kl
):
    """Also after the parameters have moved, with clips, corrections and a divergence in play."""
    model, start, reference = lab.model(2), lab.model(5), lab.model(7)
    groups = [make.sampled(receiver, rewards, p, logprobs=-1.0) for p, rewards in (("p", [1, 0, 0]), ("q", [0, 0]))]
    context = make_context(kl_coefficient=kl)
    sgt, alone = build("sgt", context), build("independent", context)
    found, expected = (
        lab.gradient(step_of(one, groups), one, model, start=start, reference=reference) for one in (sgt, alone)
    )
    assert not lab.is_zero(found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


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
