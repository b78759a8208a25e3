"""Sums and means over rows."""

import pytest
import torch

from mrl.objectives.ratios import row_mean, row_sum

ROWS = torch.tensor([2, 0, 2, 1, 0, 2])


def test_every_token_gets_the_value_of_its_row():
    """Rows need not lie together."""
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert row_sum(values, ROWS).tolist() == [10, 7, 10, 4, 7, 10]
    assert row_mean(values, ROWS).tolist() == pytest.approx([10 / 3, 3.5, 10 / 3, 4, 3.5, 10 / 3])


def test_row_values_carry_no_gradient_and_may_be_empty():
    """Means are taken under a stop-gradient, and a component without tokens is legal."""
    assert not row_mean(torch.ones(6, requires_grad=True), ROWS).requires_grad
    assert row_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
