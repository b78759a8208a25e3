"""GRAFT's term."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import Clipped, Grafted
from mrl.objectives.terms import graft_weight, term_losses

SPEC = Grafted(Clipped(0.2, 0.28), floor=0.8)


def twin(spec):
    """w 1[s > delta] min(s, 1) of a row, times PPO's term of each token."""

    def losses(row, start, _updates):
        log_s = sum(start.prox) / len(start.prox) - sum(start.mu) / len(start.mu)
        s = math.exp(max(-20.0, min(20.0, log_s)))
        w = min(s, 1.0) if s > spec.floor else 0.0
        found = []
        for lp, prox, a in zip(row.lp, start.prox, start.a, strict=True):
            r = math.exp(max(-20.0, min(20.0, lp - prox)))
            found.append(-w * min(r * a, max(1 - spec.clipped.clip_low, min(1 + spec.clipped.clip_high, r)) * a))
        return found

    return losses


@pytest.mark.parametrize("spec", [SPEC, Grafted(Clipped(0.2, 0.2), floor=0.3)], ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments."""
    check_term(spec, twin(spec), make_inputs(constant_behaviour=True))


def test_rows_at_or_below_the_floor_contribute_nothing_and_no_row_counts_more_than_once(make_inputs, gradient):
    """w is 0 up to the floor and never above 1."""
    inputs = make_inputs(constant_behaviour=True)
    weights = graft_weight(inputs.proximal_T, inputs.behaviour_T, inputs.row_T, floor=0.8)
    assert 0 < int((weights == 0).sum()) < len(weights)
    assert weights.max() == 1.0
    assert weights[weights > 0].min() > 0.8
    assert not gradient(SPEC, inputs)[weights == 0].any()
    one_row, half = torch.zeros(1, dtype=torch.int64), -torch.tensor([0.5]).log()
    assert (-half).exp() == 0.5
    assert graft_weight(torch.zeros(1), half, one_row, floor=0.5) == 0.0
    assert graft_weight(torch.zeros(1), half, one_row, floor=0.499) == 0.5


def test_a_row_that_the_learner_finds_as_likely_is_an_own_row(make_inputs):
    """pi_prox = pi_source: the weight is exactly 1, and the term is GRPO's."""
    inputs = make_inputs()
    inputs = replace(inputs, behaviour_T=inputs.proximal_T)
    assert torch.equal(term_losses(SPEC, inputs), term_losses(SPEC.clipped, inputs))
