import math

import pytest
import torch

from mrl.objectives.clipped import behaviour_weight, clipped_surrogate

# Log-ratios below, at, inside and above every clip, and beyond the exponent's bound; each with A < 0, A = 0, A > 0.
LOG_RATIOS = [-30.0, math.log(0.5), math.log(0.8) - 1e-3, math.log(0.8) + 1e-3, -0.05, 0.0, 0.05]
LOG_RATIOS += [
    math.log(1.2) - 1e-3,
    math.log(1.2) + 1e-3,
    math.log(1.28) - 1e-3,
    math.log(1.28) + 1e-3,
    math.log(9),
    30.0,
]
CASES = [(d, a) for d in LOG_RATIOS for a in (-1.3, 0.0, 0.7)]
CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.4, 0.1)]


def make_inputs():
    generator = torch.Generator().manual_seed(3)
    proximal = -3 * torch.rand(len(CASES), generator=generator, dtype=torch.float64)
    logprobs = (proximal + torch.tensor([d for d, _ in CASES], dtype=torch.float64)).requires_grad_()
    return (
        logprobs,
        proximal.requires_grad_(),
        torch.tensor([a for _, a in CASES], dtype=torch.float64, requires_grad=True),
    )


def slow_surrogate(log_pi, log_pi_prox, advantages, low, high):
    """One token at a time, in the notation of PPO, eq. 7."""
    losses = []
    for lp, lq, a in zip(log_pi, log_pi_prox, advantages, strict=True):
        r = math.exp(max(-20.0, min(20.0, lp - lq)))
        losses.append(-min(r * a, max(1 - low, min(1 + high, r)) * a))
    return losses


@pytest.mark.parametrize(("low", "high"), CLIPS)
def test_surrogate_equals_its_slow_twin(low, high):
    """The vector form equals the paper's formula on every side of every clip."""
    logprobs, proximal, advantages = make_inputs()
    loss = clipped_surrogate(logprobs, proximal, advantages, clip_low=low, clip_high=high)
    expected = slow_surrogate(logprobs.tolist(), proximal.tolist(), advantages.tolist(), low, high)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("low", "high"), CLIPS)
def test_surrogate_gradient_equals_finite_differences(low, high):
    """The gradient is that of the slow twin, and it flows through the learner's log-probabilities only."""
    logprobs, proximal, advantages = make_inputs()
    clipped_surrogate(logprobs, proximal, advantages, clip_low=low, clip_high=high).sum().backward()
    assert proximal.grad is None
    assert advantages.grad is None
    values, step = logprobs.tolist(), 1e-6
    for index, (d, a) in enumerate(CASES):
        if abs(d) == 30.0:
            assert logprobs.grad[index] == 0
            continue
        up = slow_surrogate([values[index] + step], [proximal[index].item()], [a], low, high)[0]
        down = slow_surrogate([values[index] - step], [proximal[index].item()], [a], low, high)[0]
        assert logprobs.grad[index].item() == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-8)


def test_zero_advantage_gives_exactly_zero():
    """A token without advantage contributes exactly nothing, whatever its ratio."""
    logprobs = torch.tensor([-90.0, -1.0, 0.0], requires_grad=True)
    loss = clipped_surrogate(logprobs, torch.tensor([0.0, -1.0, -90.0]), torch.zeros(3), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.tolist() == [0, 0, 0]
    assert logprobs.grad.tolist() == [0, 0, 0]


def test_on_policy_gradient_is_that_of_reinforce():
    """At ratio 1 the gradient is minus the advantage."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_surrogate(
        logprobs, logprobs.detach(), torch.tensor([0.5, -2.0]), clip_low=0.2, clip_high=0.2
    ).sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 2.0]


def test_behaviour_weight_equals_its_slow_twin_and_is_detached():
    """The weight is the ratio up to the cap, without gradient to either side."""
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -2.0, -40.0], dtype=torch.float64, requires_grad=True)
    proximal = torch.tensor([-3.0, -1.0, -0.1, -0.1, -1.0], dtype=torch.float64, requires_grad=True)
    weight = behaviour_weight(proximal, behaviour, cap=5.0)
    slow = [min(math.exp(p - q), 5.0) for p, q in zip(proximal.tolist(), behaviour.tolist(), strict=True)]
    assert weight.tolist() == pytest.approx(slow, rel=1e-12)
    assert max(slow) == 5.0
    assert min(slow) < 1
    assert not weight.requires_grad


def test_weight_one_and_fresh_proximal_reduce_to_plain_ppo():
    """Decoupled PPO with pi_prox = pi_behaviour is PPO: the weight is exactly 1."""
    _, proximal, _ = make_inputs()
    assert behaviour_weight(proximal, proximal, cap=5.0).eq(1).all()
