"""HACPO's term, and what its authors' code does."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import CrossSequence
from mrl.objectives.terms import term_losses


def twin(spec):
    """arXiv 2603.02604: clip_step(s) sg[clip_step(s)]^alpha A of a whole row."""

    def ratio(row):
        logs = [lp - mu for lp, mu in zip(row.lp, row.mu, strict=True)]
        return math.exp(min(10.0, sum(logs) / len(logs)))

    def losses(row, start, updates):
        low = min(1.0, spec.lower + updates * spec.lower_step)
        now, then = (max(low, min(1.0, ratio(one))) for one in (row, start))
        return [-now * then**spec.alpha * a for a in row.a]

    return losses


@pytest.mark.parametrize("updates", [0, 2, 3])
@pytest.mark.parametrize(
    "spec", [CrossSequence(), CrossSequence(0.5, 0.01, 3.0), CrossSequence(0.0, 0.0, 0.5)], ids=str
)
def test_the_term_equals_its_slow_twin(spec, updates, make_inputs, check_term):
    """Values, gradients and detachments, for the source's mean at every token of its row."""
    check_term(spec, twin(spec), make_inputs(constant_behaviour=True, update_index=updates))


def one_row(make_inputs, own_mean, source_mean, *, length=4, update_index=0, dtype=torch.float64):
    return replace(
        make_inputs(),
        logprobs_T=torch.full((length,), own_mean, dtype=dtype, requires_grad=True),
        behaviour_T=torch.full((length,), source_mean, dtype=dtype),
        advantages_T=torch.full((length,), 2.0, dtype=dtype),
        row_T=torch.zeros(length, dtype=torch.int64),
        update_index=update_index,
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "moves"), [(0.79, False), (0.81, True), (0.99, True), (1.01, False)])
def test_official_code_clamp_gives_no_gradient_below_the_bound_or_above_one(make_inputs, gradient, ratio, moves, sign):
    """There is no min with A, so the clip removes the row whatever the sign of its advantage."""
    inputs = one_row(make_inputs, -1.0 + math.log(ratio), -1.0)
    inputs = replace(inputs, advantages_T=sign * inputs.advantages_T)
    found = gradient(CrossSequence(lower=0.8, alpha=1.0), inputs)
    expected = -sign * 2.0 * ratio**2 if moves else 0.0
    assert found.tolist() == pytest.approx([expected] * 4)


def test_official_code_bound_rises_with_every_minibatch_and_is_capped_at_one(make_inputs):
    """m counts the updates of the step, those on own rows included: bounds .8, .85, .875 and at last 1."""
    spec = CrossSequence(lower=0.8, lower_step=0.025, alpha=0.0)
    values = []
    for update_index in (0, 2, 3, 8, 100):
        inputs = one_row(make_inputs, -3.0, -1.0, update_index=update_index)
        values.append(-term_losses(spec, inputs)[0].item() / 2.0)
    assert values == pytest.approx([0.8, 0.85, 0.875, 1.0, 1.0])


def test_tokens_of_other_sizes_change_the_ratio(make_inputs):
    """Equal total log-prob L over T_n and T_m tokens: s = exp(L (1/T_n - 1/T_m))."""
    total, own, peer = -6.0, 4, 5
    inputs = one_row(make_inputs, total / own, total / peer, length=own)
    spec = CrossSequence(lower=0.0, alpha=0.0)
    assert -term_losses(spec, inputs)[0].item() / 2.0 == pytest.approx(math.exp(total * (1 / own - 1 / peer)))


def test_a_row_of_the_learner_itself_is_on_policy(make_inputs, gradient):
    """s = 1 exactly: the value is -A and every token has its gradient."""
    inputs = one_row(make_inputs, -1.3, -1.3)
    assert term_losses(CrossSequence(alpha=3.0), inputs).tolist() == [-2.0] * 4
    assert gradient(CrossSequence(alpha=3.0), inputs).tolist() == [-2.0] * 4
