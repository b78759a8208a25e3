"""Torch's flash kernel for rows of many lengths, beside a call for each length: on a GPU from Ampere on."""

import pytest
import torch

from mrl.models.row_attention import NAMES, RowLayout, row_attention
from mrl.models.varlen_attention import AMPERE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE, reason="no GPU from Ampere on"
    ),
]
LENGTHS = (300, 17, 1, 300, 128, 77)


@pytest.mark.parametrize("sliding_window", [None, 64])
def test_one_call_attends_to_what_a_call_per_length_attends_to(sliding_window):
    """Values and gradients, heads shared by four: as near to float32 as the calls per length, but for rounding."""
    torch.manual_seed(0)
    heads = [torch.randn(1, count, sum(LENGTHS), 64, device="cuda") for count in (8, 2, 2)]
    weight = torch.randn(1, sum(LENGTHS), 8, 64, device="cuda")

    def run(kernel, dtype):
        parts = [states.to(dtype).detach().requires_grad_() for states in heads]
        attended, _ = row_attention(
            torch.nn.Module(),
            *parts,
            None,
            packed_rows=RowLayout(LENGTHS),
            kernel=kernel,
            sliding_window=sliding_window,
        )
        (attended * weight.to(dtype)).sum().backward()
        return [attended.float(), *(part.grad.float() for part in parts)]

    exact = run("rows", torch.float32)
    errors = {
        kernel: [
            float((one - other).norm().detach() / other.norm().detach())
            for one, other in zip(run(kernel, torch.bfloat16), exact, strict=True)
        ]
        for kernel in NAMES
    }
    assert all(
        at_once < 1.5 * by_length + 1e-3 for at_once, by_length in zip(errors["varlen"], errors["rows"], strict=True)
    )
