"""CISPO: clipped weights."""

import math

import pytest
import torch

from mrl.objectives.specs import Cispo, Correction


def twin(spec):
    """arXiv 2506.13585, eq. 4: the weight is taken where the gradient stops."""

    def losses(row, start, _updates):
        found = []
        for lp, lp0, prox, mu, a in zip(row.lp, start.lp, start.prox, start.mu, start.a, strict=True):
            r = math.exp(max(-20.0, min(20.0, lp0 - prox)))
            weight = max(1 - spec.clip_low, min(1 + spec.clip_high, r))
            k = min(5.0, math.exp(max(-20.0, min(20.0, prox - mu)))) if spec.correction else 1.0
            found.append(-k * weight * a * lp)
        return found

    return losses


@pytest.mark.parametrize("spec", [Cispo(), Cispo(0.2, 0.28), Cispo(10.0, 0.2, Correction())], ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments."""
    check_term(spec, twin(spec), make_inputs())


def test_no_token_with_an_advantage_loses_its_gradient(make_inputs, gradient):
    """Where PPO's clip would remove a token, CISPO bounds its weight."""
    inputs = make_inputs()
    found = gradient(Cispo(clip_low=1.0, clip_high=0.2), inputs)
    assert torch.equal(found != 0, inputs.advantages_T != 0)
    assert found.abs().max() <= 1.2 * 1.3 + 1e-12
