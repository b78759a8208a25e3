"""Log-probs of spans, divided over tokens."""

import itertools
import math
from typing import get_args

import pytest
import torch

from mrl.objectives.ratios import row_sum, spread
from mrl.objectives.specs import Spreading

SPANS = [0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5]
OWN = [-1.0, -3.0, -123.4, -0.1, 0.2, -2.0, 0.0, 0.0, 0.0, float("-inf"), -1.0]
OF_SPANS = [-2.0, -0.7, -0.3, -5.0, -1.5, -4.0]


def spread_all(rule, own=OWN, dtype=torch.float64) -> torch.Tensor:
    told = torch.tensor([OF_SPANS[span] for span in SPANS], dtype=dtype)
    return spread(told, torch.tensor(own, dtype=dtype), torch.tensor(SPANS), rule)


def slow_span(rule, total, own) -> list[float]:
    """The rule's formula for one span; equal parts where own log-probs say nothing."""
    read = [min(one, 0.0) for one in own] if rule == "receiver_multiplicative" else own
    if len(own) == 1 or not math.isfinite(sum(read)):
        return [total / len(own)] * len(own)
    match rule:
        case "receiver_multiplicative":
            return [total * one / sum(read) if sum(read) else total / len(own) for one in read]
        case "receiver_additive":
            return [one + (total - sum(own)) / len(own) for one in own]
    return [one + total - sum(own) for one in own]


def slow_rule(rule) -> list[float]:
    """All spans, one after the other."""
    inside = [[one for one, at in zip(OWN, SPANS, strict=True) if at == span] for span in range(len(OF_SPANS))]
    return list(itertools.chain(*(slow_span(rule, *pair) for pair in zip(OF_SPANS, inside, strict=True))))


@pytest.mark.parametrize("rule", get_args(Spreading))
def test_the_rule_follows_its_formula(rule):
    """Each against its slow twin, uniform where own log-probs say nothing."""
    assert spread_all(rule).tolist() == pytest.approx(slow_rule(rule), rel=1e-14)


@pytest.mark.parametrize("rule", ["receiver_multiplicative", "receiver_additive"])
def test_every_span_keeps_its_total(rule):
    """The mass is the peer's; only its place inside the span is a guess. Scaled numbers stay probabilities."""
    found = spread_all(rule, dtype=torch.float32)
    totals = row_sum(found, torch.tensor(SPANS))
    torch.testing.assert_close(totals, torch.tensor([OF_SPANS[span] for span in SPANS]))
    assert rule == "receiver_additive" or (found <= 0).all()


def test_what_is_not_divided_keeps_the_ratio_of_its_span():
    """Own log-prob less what is found is, at each token of a span, the log-ratio of the whole span."""
    found = spread_all("none")
    ratios = (torch.tensor(OWN, dtype=torch.float64) - found).tolist()
    for token, span in enumerate(SPANS[:9]):
        own = sum(o for o, s in zip(OWN, SPANS, strict=True) if s == span)
        assert ratios[token] == pytest.approx(own - OF_SPANS[span], abs=1e-12)


@pytest.mark.parametrize("rule", get_args(Spreading))
def test_one_token_keeps_its_bits(rule):
    """Nothing is read into a span of one token, in single precision neither."""
    found = spread_all(rule, dtype=torch.float32)
    alone = [place for place, span in enumerate(SPANS) if SPANS.count(span) == 1]
    assert found[alone].tolist() == torch.tensor([OF_SPANS[SPANS[place]] for place in alone]).tolist()


@pytest.mark.parametrize("rule", get_args(Spreading))
def test_an_absent_number_stays_absent_and_nothing_has_gradient(rule):
    """NaN says that the teacher was silent about the span; own log-probs only divide."""
    own = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    found = spread(torch.tensor([float("nan"), float("nan"), -1.0]), own, torch.tensor([0, 0, 1]), rule)
    assert found.isnan().tolist() == [True, True, False]
    assert not found.requires_grad
