"""AdamW with its moments in main memory and its parameters on a GPU: the same bits, and little on the device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import AdamW, Optimizer

from mrl.learner.piecewise_adamw import VISITORS, PiecewiseAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
PIECE_ELEMENTS = 1 << 20
SLACK_BYTES = 1 << 20
"""What the allocator rounds up, and counts of steps."""


def trained(make_optimizer: Callable[..., Optimizer]) -> tuple[list[torch.Tensor], int, int]:
    """Parameters after three updates, bytes on the GPU between two updates, and at most in the last one."""
    generator = torch.Generator("cuda").manual_seed(0)
    before = torch.cuda.memory_allocated()
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, device="cuda"))
        for shape in ((4096, 4099), (33, 7), (5,))
    ]
    optimizer = make_optimizer(parameters, **SETTINGS)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    held, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    return [parameter.detach().cpu() for parameter in parameters], held, most


def test_a_gpu_holds_no_moments_and_trains_the_same_parameters() -> None:
    """Bit for bit; eight bytes less for each parameter."""
    given, held_with, _ = trained(partial(AdamW, fused=True))
    own, held, most = trained(partial(PiecewiseAdamW, on_host=True, piece_elements=PIECE_ELEMENTS))
    assert all(torch.equal(one, other) for one, other in zip(own, given, strict=True))
    assert held <= held_with - 8 * sum(one.numel() for one in own) + SLACK_BYTES
    assert most <= held + VISITORS * 8 * PIECE_ELEMENTS + SLACK_BYTES


def test_small_moments_take_half_and_are_the_same_wherever_they_lie() -> None:
    """Bit for bit; four bytes for each parameter, on the GPU or not."""
    small = partial(PiecewiseAdamW, dtype=torch.bfloat16, piece_elements=PIECE_ELEMENTS)
    given, held_with, _ = trained(partial(small, on_host=False))
    own, held, _ = trained(partial(small, on_host=True))
    assert all(torch.equal(one, other) for one, other in zip(own, given, strict=True))
    assert abs(held_with - held - 4 * sum(one.numel() for one in own)) <= SLACK_BYTES
