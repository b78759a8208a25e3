"""F-TIS's filter of bad answers that the policy would hardly give."""

import math

import pytest
import torch

from mrl.objectives.ratios import spread
from mrl.objectives.specs import Clipped, Correction, Filtered
from mrl.objectives.terms import TermInputs, filtered_tokens, term_losses

BEHAVIOUR = Clipped(0.2, 0.28, base="behaviour", dual_clip=3.0)


def bounded(log_ratio):
    return math.exp(max(-20.0, min(20.0, log_ratio)))


def twin(spec):
    """0 for a row of negative advantage with D > max, else the clipped term of each token, dual clip included."""

    def losses(row, start, _updates):
        d = sum(mu - prox for mu, prox in zip(start.mu, start.prox, strict=True)) / len(start.mu)
        found = []
        for lp, mu, a in zip(row.lp, start.mu, start.a, strict=True):
            r = bounded(lp - mu)
            loss = -min(r * a, max(1 - spec.clipped.clip_low, min(1 + spec.clipped.clip_high, r)) * a)
            if a < 0:
                loss = min(loss, -spec.clipped.dual_clip * a)
            found.append(0.0 * lp if a < 0 and d > spec.max_divergence_nats else loss)
        return found

    return losses


@pytest.mark.parametrize("bound", [0.0, 0.5, 3.0])
def test_the_term_equals_its_slow_twin(bound, make_inputs, check_term):
    """Values, gradients and detachments; rows stand on both sides of the bound at either sign."""
    spec = Filtered(BEHAVIOUR, bound)
    inputs = make_inputs()
    dropped = filtered_tokens(spec, inputs)
    assert 0 < int(dropped.sum()) < int((inputs.advantages_T < 0).sum())
    check_term(spec, twin(spec), inputs)


def one_row(behaviour, proximal, advantage):
    """A row of these tokens."""
    size = len(behaviour)
    return TermInputs(
        logprobs_T=torch.tensor(proximal, dtype=torch.float64),
        proximal_T=torch.tensor(proximal, dtype=torch.float64),
        behaviour_T=torch.tensor(behaviour, dtype=torch.float64),
        advantages_T=torch.full((size,), advantage, dtype=torch.float64),
        row_T=torch.zeros(size, dtype=torch.int64),
        teacher_T=torch.full((size,), math.nan, dtype=torch.float64),
    )


@pytest.mark.parametrize(("advantage", "bound", "is_dropped"), [
    (-1.0, 0.74, True), (-1.0, 0.75, False), (1.0, 0.0, False), (0.0, 0.0, False),
])  # fmt: skip
def test_the_mean_of_a_row_decides(advantage, bound, is_dropped):
    """D = ((-1 + 2) + (-2 + 2.5)) / 2 = 0.75: above the bound, not at it, and only where the answer is bad."""
    inputs = one_row([-1.0, -2.0], [-2.0, -2.5], advantage)
    assert filtered_tokens(Filtered(BEHAVIOUR, bound), inputs).tolist() == [is_dropped] * 2


@pytest.mark.parametrize("rule", ["receiver_multiplicative", "receiver_additive"])
def test_how_a_span_is_spread_does_not_matter(rule):
    """Every rule that keeps the sum of a span keeps D."""
    own = torch.tensor([-0.2, -3.0, -1.0], dtype=torch.float64)
    span_sums = torch.tensor([-2.0, -2.0, -0.5], dtype=torch.float64)
    told = spread(span_sums, own, torch.tensor([0, 0, 1]), rule)
    inputs = one_row(told.tolist(), own.tolist(), -1.0)
    exact = ((-2.0 - 0.5) - own.sum().item()) / 3
    assert filtered_tokens(Filtered(BEHAVIOUR, exact - 1e-9), inputs).all()
    assert not filtered_tokens(Filtered(BEHAVIOUR, exact + 1e-9), inputs).any()


@pytest.mark.parametrize("clip", [BEHAVIOUR, Clipped(correction=Correction("geometric", "truncate", 0.5, 2.0))])
def test_without_a_bad_answer_beyond_the_bound_it_is_the_clipped_term(clip, make_inputs):
    """To the bit."""
    inputs = make_inputs()
    assert torch.equal(term_losses(Filtered(clip, 1e9), inputs), term_losses(clip, inputs))
