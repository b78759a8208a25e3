"""Detached weights: token, sequence and geometric; truncated, masked and gated."""

import math
from itertools import product

import pytest
import torch

from mrl.objectives.ratios import correction_weight
from mrl.objectives.specs import Correction
from mrl.objectives.terms import corrected


def slow_weights(spec, prox, mu, rows):
    """Row by row and token by token."""
    found = []
    for i in range(len(prox)):
        logs = [p - q for p, q, r in zip(prox, mu, rows, strict=True) if r == rows[i]]
        log = {"token": prox[i] - mu[i], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[spec.level]
        k = math.exp(max(-20.0, min(20.0, log)))
        inside = spec.lower <= k <= spec.upper
        by_action = {"truncate": max(spec.lower, min(k, spec.upper)), "mask": k * inside, "gate": float(inside)}
        found.append(by_action[spec.action])
    return found


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask", "gate"])
@pytest.mark.parametrize("bounds", [(0.0, 5.0), (0.5, 2.0)])
def test_weights_equal_their_slow_twin(level, action, bounds, make_inputs):
    """On both sides of both bounds, and beyond the exponent's bound."""
    inputs, spec = make_inputs(), Correction(level, action, *bounds)
    weights = correction_weight(spec, inputs.proximal_T, inputs.behaviour_T, inputs.row_T)
    slow = slow_weights(spec, inputs.proximal_T.tolist(), inputs.behaviour_T.tolist(), inputs.row_T.tolist())
    torch.testing.assert_close(weights, torch.tensor(slow, dtype=torch.float64), rtol=1e-11, atol=0)
    assert len(set(slow)) > 1
    assert not weights.requires_grad


def test_the_default_cap_is_five(make_inputs):
    """Weights up to it are what they are, those above are it; the inputs stand on both sides, close by."""
    inputs = make_inputs()
    weights = correction_weight(Correction(), inputs.proximal_T, inputs.behaviour_T, inputs.row_T)
    ratios = (inputs.proximal_T - inputs.behaviour_T).detach().exp()
    for near, weight in ((4.99, 4.99), (5.01, 5.0)):
        here = (ratios - near).abs() < 1e-6
        assert here.any()
        assert weights[here].tolist() == pytest.approx([weight] * int(here.sum()))


def test_equal_policies_have_weight_one(make_inputs):
    """pi_prox = pi_behaviour gives exactly 1 at every level."""
    inputs = make_inputs()
    for level, action in product(("token", "sequence", "geometric"), ("truncate", "mask", "gate")):
        spec = Correction(level, action, 0.5, 2.0)
        assert correction_weight(spec, inputs.proximal_T, inputs.proximal_T, inputs.row_T).eq(1).all()


def test_no_correction_is_no_product(make_inputs):
    """Without a correction the term is given back as it is."""
    inputs = make_inputs()
    assert corrected(inputs.logprobs_T, None, inputs) is inputs.logprobs_T


def test_a_spread_that_keeps_the_mass_keeps_every_weight_of_rows(make_inputs):
    """However a peer's log-probability is dealt out over a row's tokens, product and geometric mean stay."""
    inputs = make_inputs()
    spread = inputs.behaviour_T.detach().clone()
    for row in range(int(inputs.row_T.max()) + 1):
        mine = inputs.row_T == row
        spread[mine] = spread[mine].mean()
    for level in ("sequence", "geometric"):
        spec = Correction(level, "truncate", 0.0, 5.0)
        before = correction_weight(spec, inputs.proximal_T, inputs.behaviour_T, inputs.row_T)
        after = correction_weight(spec, inputs.proximal_T, spread, inputs.row_T)
        torch.testing.assert_close(before, after)
