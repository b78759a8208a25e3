"""Log-probs of spans, divided over tokens."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from mrl.alignment.spreading import SPREADING
from mrl.objectives.rows import row_sum
from mrl.objectives.spreading import spread

SPANS = [0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 5]
OWN = [-1.0, -3.0, -0.5, -0.1, 0.2, -2.0, 0.0, 0.0, 0.0, float("-inf"), -1.0]
OF_SPANS = [-2.0, -0.7, -0.3, -5.0, -1.5, -4.0]


class Spanned(NamedTuple):
    """What alignment's rule reads."""

    token_bytes: np.ndarray
    span_of_token: np.ndarray
    span_logprob: np.ndarray
    span_receiver_tokens: np.ndarray


def spread_all(own=OWN, dtype=torch.float64) -> torch.Tensor:
    told = torch.tensor([OF_SPANS[span] for span in SPANS], dtype=dtype)
    return spread(told, torch.tensor(own, dtype=dtype), torch.tensor(SPANS))


def test_the_rule_is_that_of_alignment():
    """Multiplicative, uniform where own log-probs say nothing."""
    sizes = np.bincount(SPANS)
    spanned = Spanned(np.ones(len(SPANS)), np.array(SPANS), np.array(OF_SPANS), sizes)
    slow = SPREADING["receiver_multiplicative"](spanned, np.array(OWN))
    assert spread_all().tolist() == pytest.approx(slow.tolist(), rel=1e-14)


def test_every_span_keeps_its_total_and_one_token_its_bits():
    """The mass is the peer's; only its place inside the span is a guess."""
    found = spread_all(dtype=torch.float32)
    totals = row_sum(found, torch.tensor(SPANS))
    torch.testing.assert_close(totals, torch.tensor([OF_SPANS[span] for span in SPANS]))
    alone = [place for place, span in enumerate(SPANS) if SPANS.count(span) == 1]
    assert found[alone].tolist() == torch.tensor([OF_SPANS[SPANS[place]] for place in alone]).tolist()
    assert (found <= 0).all()


def test_an_absent_number_stays_absent_and_nothing_has_gradient():
    """NaN says that the teacher was silent about the span; own log-probs only divide."""
    own = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    found = spread(torch.tensor([float("nan"), float("nan"), -1.0]), own, torch.tensor([0, 0, 1]))
    assert found.isnan().tolist() == [True, True, False]
    assert not found.requires_grad
