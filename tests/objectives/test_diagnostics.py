import math

import pytest
import torch

from mrl.objectives.diagnostics import clipped_tokens, k3_nats, sampled_entropy_nats
from mrl.objectives.specs import Cispo, Clipped, Correction, CrossSequence, Dppo, Filtered, Grafted, Imitation, Trrd


def test_k3_is_unbiased_for_the_divergence():
    """Averaged over the sampler's distribution, k3 is KL(sampler || policy); it is never negative."""
    sampler = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    policy = torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64)
    k3 = k3_nats(policy.log(), sampler.log())
    divergence = (sampler * (sampler / policy).log()).sum()
    assert (sampler * k3).sum().item() == pytest.approx(divergence.item(), rel=1e-12)
    assert k3.min() >= 0
    assert k3_nats(sampler.log(), sampler.log()).eq(0).all()


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
def test_clipped_tokens_are_those_above_the_clip_with_a_gain_and_below_it_with_a_loss(low, high, make_inputs):
    """PPO's rule, token by token; a weight of 0 outside the clip counts as no clip."""
    inputs = make_inputs()
    expected = []
    for lp, prox, a in zip(
        inputs.logprobs_T.tolist(), inputs.proximal_T.tolist(), inputs.advantages_T.tolist(), strict=True
    ):
        ratio, overflow = math.exp(lp - prox), abs(lp - prox) > 20
        expected.append((ratio > 1 + high and a > 0) or (ratio < 1 - low and a < 0) or (overflow and a != 0))
    with torch.no_grad():
        assert clipped_tokens(Clipped(low, high), inputs).tolist() == expected
        masked = Clipped(low, high, correction=Correction("token", "gate", 0.99, 1.01))
        assert clipped_tokens(masked, inputs).tolist() == expected
        gated = Grafted(Clipped(low, high), floor=0.99)
        assert clipped_tokens(gated, inputs).tolist() == expected
        assert clipped_tokens(Filtered(Clipped(low, high), -1.0), inputs).tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_terms_without_a_clip_clip_nothing(make_inputs):
    """CISPO keeps every gradient, and imitation knows no advantage."""
    inputs = make_inputs()
    assert not clipped_tokens(Cispo(), inputs).any()
    assert not clipped_tokens(Imitation(), inputs).any()


def test_masks_and_row_clips_count_as_clips(make_inputs):
    """DPPO's mask in spite of its penalty, HACPO's clip for whole rows, RLAD's through its mixed ratio."""
    inputs = make_inputs(constant_behaviour=True)
    share = {}
    for spec in (Dppo(penalty=0.1), CrossSequence(), Trrd()):
        found = clipped_tokens(spec, inputs)
        assert not found[inputs.advantages_T == 0].any()
        share[type(spec)] = float(found.double().mean())
    assert all(0 < value < 1 for value in share.values())
    rows = torch.zeros(int(inputs.row_T.max()) + 1).index_add(
        0, inputs.row_T, clipped_tokens(CrossSequence(), inputs).float()
    )
    sizes = torch.bincount(inputs.row_T)
    assert ((rows == 0) | (rows == sizes)).all()


def test_diagnostics_carry_no_gradient(make_inputs):
    """Nothing here can reach the loss."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = [k3_nats(logprobs, torch.tensor([-1.0, -1.0])), sampled_entropy_nats(logprobs)]
    assert not any(value.requires_grad for value in found)
    assert found[1].tolist() == [1.0, 2.0]
    inputs = make_inputs()
    clipped_tokens(Clipped(), inputs)
    assert inputs.logprobs_T.grad is None
