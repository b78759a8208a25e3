"""Log-probabilities of given tokens, and entropies, without ever holding the [T, V] logits of a whole microbatch.

Shapes: T tokens, C tokens of one chunk, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.objectives.liger import fused_logprobs, fused_logprobs_and_entropy

Kernel: TypeAlias = Literal["chunked", "liger"]
ChunkOutputs: TypeAlias = tuple[Tensor, ...]
"""[C] each."""
OutputsOf: TypeAlias = Callable[[Tensor, Tensor], ChunkOutputs]
"""([C, V] scaled logits, [C] targets) -> outputs."""


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
    kernel: Kernel = "chunked",
) -> Tensor:
    """log pi(target_t) under the sampling distribution at `temperature`, in chunks of at most `chunk_tokens` tokens.

        l_t = z_t[y_t] / tau - logsumexp_v(z_t[v] / tau),   z_t = W h_t, or softcap * tanh(W h_t / softcap)

    The logits of a chunk are computed in the dtype of the hidden states, reduced in float32 (float64 stays), freed, and
    computed anew in the backward pass, so that memory is O(C V). Temperature is applied because the engine's
    log-probabilities have it too. Gradient flows through `hidden_TD` and `head_VD`. Returns [T] float32.

    The kernel "liger" does the same without logits, where `mrl.objectives.liger` can.
    """
    if kernel == "liger" and len(targets_T):
        return fused_logprobs(hidden_TD, head_VD, targets_T, temperature)
    softmax = _Softmax(temperature, softcap)
    (logprobs_T,) = _in_chunks(_logprobs, hidden_TD, head_VD, targets_T, softmax=softmax, chunk_tokens=chunk_tokens)
    return logprobs_T


def token_logprobs_and_entropy(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
    kernel: Kernel = "chunked",
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and from the same logits the entropy of the distribution that each token was drawn from.

        H_t = -sum_v p_t[v] log p_t[v] = logsumexp_v(z_t[v] / tau) - sum_v p_t[v] z_t[v] / tau

    Returns [T] float32 log-probabilities and [T] float32 entropies in nats, both with gradient.
    """
    if kernel == "liger" and len(targets_T):
        return fused_logprobs_and_entropy(hidden_TD, head_VD, targets_T, temperature)
    softmax = _Softmax(temperature, softcap)
    logprobs_T, entropy_T = _in_chunks(
        _logprobs_and_entropy, hidden_TD, head_VD, targets_T, softmax=softmax, chunk_tokens=chunk_tokens
    )
    return logprobs_T, entropy_T


@dataclass(frozen=True, slots=True)
class _Softmax:
    temperature: float
    softcap: float | None

    def scaled(self, logits_CV: Tensor) -> Tensor:
        """[C, V] in float32 at least."""
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if self.softcap is not None:
            logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
        return logits_CV / self.temperature


def _in_chunks(
    outputs_of: OutputsOf,
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    softmax: _Softmax,
    chunk_tokens: int,
) -> ChunkOutputs:
    outputs: ChunkOutputs = _Chunked.apply(  # type: ignore[no-untyped-call]
        outputs_of, softmax, chunk_tokens, targets_T, hidden_TD, head_VD
    )
    return outputs


class _Chunked(torch.autograd.Function):
    """Every chunk's logits live once in the forward pass and once more in the backward pass.

    The gradient of the head grows in one tensor of its size; autograd itself would make another one for every chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs_of: OutputsOf,
        softmax: _Softmax,
        chunk_tokens: int,
        targets_T: Tensor,
        hidden_TD: Tensor,
        head_VD: Tensor,
    ) -> ChunkOutputs:
        ctx.save_for_backward(targets_T, hidden_TD, head_VD)
        ctx.outputs_of, ctx.softmax, ctx.chunk_tokens = outputs_of, softmax, chunk_tokens
        ctx.set_materialize_grads(False)
        chunks = zip(torch.split(hidden_TD, chunk_tokens), torch.split(targets_T, chunk_tokens), strict=True)
        pieces = [outputs_of(softmax.scaled(hidden_CD @ head_VD.T), targets_C) for hidden_CD, targets_C in chunks]
        return tuple(torch.cat(outputs) for outputs in zip(*pieces, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_T: Tensor | None) -> tuple[Tensor | None, ...]:
        targets_T, hidden_TD, head_VD = ctx.saved_tensors
        hidden_gradient_TD = torch.empty_like(hidden_TD)
        sum_dtype = torch.promote_types(head_VD.dtype, torch.float32)
        head_gradient_VD = torch.zeros_like(head_VD, dtype=sum_dtype) if ctx.needs_input_grad[-1] else None
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden_CD = hidden_TD[rows]
            of_logits_CV = _logits_gradient(ctx, hidden_CD @ head_VD.T, targets_T[rows], gradients_T, rows)
            torch.mm(of_logits_CV, head_VD, out=hidden_gradient_TD[rows])
            if head_gradient_VD is not None:
                _add_product(head_gradient_VD, of_logits_CV, hidden_CD)
        head_gradient_VD = None if head_gradient_VD is None else head_gradient_VD.to(head_VD.dtype)
        return None, None, None, None, hidden_gradient_TD, head_gradient_VD


def _logits_gradient(
    ctx: Any, logits_CV: Tensor, targets_C: Tensor, gradients_T: Sequence[Tensor | None], rows: slice
) -> Tensor:
    """[C, V] gradient of a chunk's logits, given those [T] of all outputs; None of an output that nobody used."""
    with torch.enable_grad():
        logits_CV.requires_grad_()
        outputs = ctx.outputs_of(ctx.softmax.scaled(logits_CV), targets_C)
    used = [
        (one, gradient_T[rows]) for one, gradient_T in zip(outputs, gradients_T, strict=True) if gradient_T is not None
    ]
    (of_logits_CV,) = torch.autograd.grad([one for one, _ in used], logits_CV, [gradient for _, gradient in used])
    return of_logits_CV


def _add_product(sum_VD: Tensor, of_logits_CV: Tensor, hidden_CD: Tensor) -> None:
    """sum += gradient^T h; what has fewer bits is multiplied as it is, and added up in the bits of the sum."""
    if of_logits_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(of_logits_CV.T, hidden_CD)
    else:
        sum_VD.add_(of_logits_CV.T @ hidden_CD)


def _logprobs(logits_CV: Tensor, targets_C: Tensor) -> ChunkOutputs:
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return (picked_C - torch.logsumexp(logits_CV, dim=-1),)


def _logprobs_and_entropy(logits_CV: Tensor, targets_C: Tensor) -> ChunkOutputs:
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    normaliser_C = torch.logsumexp(logits_CV, dim=-1)
    mean_logit_C = (torch.softmax(logits_CV, dim=-1) * logits_CV).sum(-1)
    return picked_C - normaliser_C, normaliser_C - mean_logit_C
