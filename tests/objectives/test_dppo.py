"""DPPO: a trust region of probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import Dppo


def twin(spec):
    """The mask of prime-rl, one token at a time, taken where the gradient stops."""

    def losses(row, start, _updates):
        found = []
        for lp, lp0, mu, a in zip(row.lp, start.lp, start.mu, start.a, strict=True):
            gap = math.exp(lp0) - math.exp(mu)
            dropped = (a > 0 and gap > spec.max_probability_gap) or (a < 0 and gap < -spec.max_probability_gap)
            r = math.exp(max(-20.0, min(20.0, lp - mu)))
            found.append(-(not dropped) * a * r + spec.penalty * (lp - mu) ** 2)
        return found

    return losses


@pytest.mark.parametrize("spec", [Dppo(), Dppo(0.05, 0.0), Dppo(0.2, 0.1)], ids=str)
def test_the_term_equals_its_slow_twin(spec, make_inputs, check_term):
    """Values, gradients and detachments."""
    check_term(spec, twin(spec), make_inputs())


def test_the_region_is_one_of_probabilities(make_inputs, gradient):
    """A rare token may grow tenfold; a likely one may not grow by a third; neither is held when it moves back."""
    logs = [math.log(p) for p in (0.01, 0.8, 0.8)]
    base = [math.log(p) for p in (0.001, 0.5, 0.5)]
    some = make_inputs()
    inputs = replace(
        some,
        logprobs_T=torch.tensor(logs, requires_grad=True),
        behaviour_T=torch.tensor(base),
        advantages_T=torch.tensor([1.0, 1.0, -1.0]),
    )
    assert gradient(Dppo(0.2, 0.0), inputs).tolist() == pytest.approx([-10.0, 0.0, 1.6])
