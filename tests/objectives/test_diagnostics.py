import math

import pytest
import torch

from mrl.objectives.clipped import clipped_surrogate
from mrl.objectives.diagnostics import clipped_tokens, k3_nats, ratios, sampled_entropy_nats


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
def test_clipped_tokens_are_those_without_gradient(low, high):
    """Exactly the tokens that are reported as clipped get no gradient although they have an advantage."""
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 4.0], dtype=torch.float64).repeat(2)
    advantages = torch.tensor([1.0] * 9 + [-1.0] * 9, dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    proximal = torch.zeros_like(ratio)
    clipped_surrogate(logprobs, proximal, advantages, clip_low=low, clip_high=high).sum().backward()
    clipped = clipped_tokens(logprobs, proximal, advantages, clip_low=low, clip_high=high)
    assert clipped.tolist() == logprobs.grad.eq(0).tolist()
    assert 0 < clipped.sum() < len(ratio)


def test_diagnostics_carry_no_gradient():
    """Nothing here can reach the loss."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    base = torch.tensor([-1.0, -1.0])
    found = [k3_nats(logprobs, base), sampled_entropy_nats(logprobs), ratios(logprobs, base)]
    assert not any(value.requires_grad for value in found)
    assert found[1].tolist() == [1.0, 2.0]
    assert found[2].tolist() == pytest.approx([1.0, math.exp(-1)])
