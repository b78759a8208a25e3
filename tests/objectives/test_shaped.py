"""LUFFY's term."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.objectives.specs import Shaped


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_the_term_equals_its_slow_twin(gamma, make_inputs, check_term):
    """-A p / (p + gamma)."""

    def twin(row, _start, _updates):
        return [-a * math.exp(lp) / (math.exp(lp) + gamma) for lp, a in zip(row.lp, row.a, strict=True)]

    check_term(Shaped(gamma), twin, make_inputs())


def test_unlikely_tokens_count_most(make_inputs, gradient):
    """The pull on log p is largest at p = gamma, and vanishes at both ends without overflow."""
    probabilities = torch.logspace(-30, 0, 31, dtype=torch.float64)
    inputs = replace(
        make_inputs(),
        logprobs_T=probabilities.log().requires_grad_(),
        advantages_T=torch.ones_like(probabilities),
    )
    pull = -gradient(Shaped(0.1), inputs)
    assert probabilities[pull.argmax()].item() == pytest.approx(0.1)
    assert pull.max().item() == pytest.approx(0.25)
    assert pull.isfinite().all()
