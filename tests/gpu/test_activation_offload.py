"""Inputs of blocks that wait in locked main memory: the same bits, and less on the GPU."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mrl.learner.activation_offload import LEAVING, OffloadedInputs
from mrl.learner.sharding import checkpoint_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BLOCKS, PLACES, WIDTH = 12, 8192, 1024
INPUT_BYTES = 4 * PLACES * WIDTH
SLACK_BYTES = 1 << 20


class Block(nn.Module):
    """Enough arithmetic for copies to run beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(nn.functional.gelu(self.inner(hidden)))


def trained(offloaded: OffloadedInputs | None) -> tuple[list[torch.Tensor], int]:
    """Gradients after three passes, and the most bytes at once in the last one, beyond what was there before."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    checkpoint_blocks(list(blocks), offloaded)
    for _ in range(3):
        hidden = torch.randn(PLACES, WIDTH, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        blocks(hidden).square().mean().backward()
        del hidden
    torch.cuda.synchronize()
    gradients = [parameter.grad.cpu() for parameter in blocks.parameters() if parameter.grad is not None]
    return gradients, torch.cuda.max_memory_allocated() - before


def test_a_gpu_keeps_no_inputs_and_computes_the_same_gradients() -> None:
    """Bit for bit; but for two inputs on their way, all of them leave."""
    wanted, peak_with = trained(None)
    found, peak = trained(OffloadedInputs())
    assert len(found) == 4 * BLOCKS
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert peak <= peak_with - (BLOCKS - 2 - LEAVING) * INPUT_BYTES + SLACK_BYTES


def test_what_is_kept_is_what_was_given() -> None:
    """Also while the stream that computes is busy before, and writes over the memory afterwards."""
    offloaded = OffloadedInputs()
    weight = torch.randn(4096, 4096, device="cuda")
    given = [torch.randn(PLACES, WIDTH, device="cuda", requires_grad=True) for _ in range(6)]
    values = [tensor.detach().cpu() for tensor in given]
    outputs = []
    for tensor in given:
        busy = weight @ weight
        with offloaded.hooks():
            outputs.append(checkpoint(torch.sin, tensor * 1, use_reentrant=False, preserve_rng_state=False))
        torch.full((PLACES, WIDTH), float(busy.shape[0]), device="cuda")
    torch.stack([output.sum() for output in outputs]).sum().backward()
    for tensor, value in zip(given, values, strict=True):
        assert torch.equal(tensor.grad.cpu(), value.cuda().cos().cpu())
