"""Liger's fused kernel on a Hopper GPU, held to what float64 gives: no further from it than bfloat16 explains."""

import pytest
import torch
from torch import Tensor

from mrl.objectives.liger import HOPPER, missing_packages
from mrl.objectives.logprobs import token_logprobs, token_logprobs_and_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # it is compiled when it is called first
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER, reason="no Hopper GPU"
    ),
    pytest.mark.skipif(bool(missing_packages()), reason="no liger-kernel: pip install 'mrl[liger]'"),
]
SHAPES = [(1, 64, 256), (13, 128, 1000), (1500, 1024, 32003)]
"""Tokens, width, vocabulary: alone, of no tile's size, and over several waves with a tail."""


def make_inputs(tokens: int, width: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(11)
    how = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(tokens, width, **how).bfloat16().requires_grad_()
    head = (3 * width**-0.5 * torch.randn(vocab_size, width, **how)).bfloat16().requires_grad_()
    return hidden, head, torch.randint(0, vocab_size, (tokens,), **how)


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("tokens", "width", "vocab_size"), SHAPES)
def test_values_and_gradients_are_as_near_as_those_of_the_chunks(
    tokens: int, width: int, vocab_size: int, temperature: float
) -> None:
    """Each at most twice as far from float64 as the chunks are in bfloat16, and 1% beside."""
    hidden, head, targets = make_inputs(tokens, width, vocab_size)
    direction = torch.linspace(0.5, 1, tokens, device="cuda")

    def outputs(kernel: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        options = {"temperature": temperature, "chunk_tokens": 512, "kernel": kernel}
        inputs = [one.detach().to(dtype).requires_grad_() for one in (hidden, head)]
        alone = token_logprobs(*inputs, targets, **options)
        logprobs, entropy = token_logprobs_and_entropy(*inputs, targets, **options)
        gradients = [
            torch.autograd.grad((direction * one).sum(), inputs, retain_graph=True)
            for one in (alone, logprobs, entropy)
        ]
        return alone.detach(), logprobs.detach(), entropy.detach(), *(one for pair in gradients for one in pair)

    exact = outputs("chunked", torch.float64)
    for found, chunked, true in zip(outputs("liger"), outputs("chunked"), exact, strict=True):
        assert apart(found, true) <= 2 * apart(chunked, true) + 0.01


def test_no_logits_are_in_memory() -> None:
    """Forward and backward of 8192 tokens and 131,072 words need less than half of their logits in bfloat16."""
    hidden, head, targets = make_inputs(8192, 512, 131072)
    token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=512, kernel="liger").sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, head, targets, temperature=1.0, chunk_tokens=512, kernel="liger").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8192 * 131072
