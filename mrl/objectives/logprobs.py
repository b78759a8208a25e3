"""Log-probabilities of given tokens, and entropies, without ever holding the [T, V] logits of a whole microbatch.

Shapes: T tokens, N targets of a token, C tokens of one chunk, D hidden width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.objectives.liger import fused_logprobs, fused_logprobs_and_entropy

Kernel: TypeAlias = Literal["chunked", "liger"]


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
    """Return log pi(target_t) under the sampling distribution at `temperature`, `chunk_tokens` tokens at a time.

        l_t = z_t[y_t] / tau - logsumexp_v(z_t[v] / tau),   z_t = W h_t, or softcap * tanh(W h_t / softcap)

    The logits of a chunk are computed in the dtype of the hidden states, reduced in float32 (float64 stays), freed, and
    computed anew in the backward pass, so that memory is O(C V). Temperature is applied because the engine's
    log-probabilities have it too. Gradient flows through `hidden_TD` and `head_VD`. Returns [T] float32.

    `targets_T` may be [T, N], N ids in the place of each token; then [T, N] is returned, which "liger" cannot.

    The kernel "liger" returns the same without logits in memory, where `mrl.objectives.liger` can.
    """
    if kernel == "liger" and len(targets_T):
        return fused_logprobs(hidden_TD, head_VD, targets_T, temperature)
    logprobs_T: Tensor
    (logprobs_T,) = _Chunked.apply(  # type: ignore[no-untyped-call]
        False, _Scale(temperature, softcap), chunk_tokens, targets_T, hidden_TD, head_VD
    )
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
    """Return `token_logprobs`, and from the same logits the entropy of the distribution behind each token.

        H_t = -sum_v p_t[v] log p_t[v] = logsumexp_v(z_t[v] / tau) - sum_v p_t[v] z_t[v] / tau

    Returns float32 log-probabilities, [T] or [T, N], and [T] float32 entropies in nats, both with gradient.
    """
    if kernel == "liger" and len(targets_T):
        return fused_logprobs_and_entropy(hidden_TD, head_VD, targets_T, temperature)
    logprobs_T, entropy_T = _Chunked.apply(  # type: ignore[no-untyped-call]
        True, _Scale(temperature, softcap), chunk_tokens, targets_T, hidden_TD, head_VD
    )
    return logprobs_T, entropy_T


@dataclass(frozen=True, slots=True)
class _Scale:
    """Scaling of the head's products x to logits z: z = softcap * tanh(x / softcap) / tau."""

    temperature: float
    softcap: float | None

    def scaled(self, products_CV: Tensor) -> Tensor:
        """Return [C, V] logits, in float32 at least; with nothing to scale, the products themselves."""
        if self.softcap is None and self.temperature == 1.0:
            return products_CV
        wide_CV = products_CV.to(_wide(products_CV))
        if self.softcap is not None:
            wide_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return wide_CV.div_(self.temperature)

    def bend(self, logits_CV: Tensor) -> Tensor | None:
        """Return tau dz/dx from the logits z: 1 - (tau z / softcap)^2; None where it is 1."""
        if self.softcap is None:
            return None
        return (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


class _Chunked(torch.autograd.Function):
    """`token_logprobs` with a backward pass of its own: each chunk's logits live once in the forward pass and once more
    in the backward pass.

    The gradient of the head grows in one tensor of its size; autograd itself would make another one for every chunk.
    Autograd would also read and write the logits three times as often as the formula of `_products_gradient`, and with
    a large vocabulary that is most of the time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        with_entropy: bool,
        scale: _Scale,
        chunk_tokens: int,
        targets_T: Tensor,
        hidden_TD: Tensor,
        head_VD: Tensor,
    ) -> tuple[Tensor, ...]:
        chunks = zip(torch.split(hidden_TD, chunk_tokens), torch.split(targets_T, chunk_tokens), strict=True)
        pieces = [
            _outputs(scale.scaled(hidden_CD @ head_VD.T), targets_C, with_entropy) for hidden_CD, targets_C in chunks
        ]
        normaliser_T, *outputs_T = (torch.cat(outputs) for outputs in zip(*pieces, strict=True))
        ctx.save_for_backward(targets_T, hidden_TD, head_VD, normaliser_T, outputs_T[-1] if with_entropy else None)
        ctx.scale, ctx.chunk_tokens = scale, chunk_tokens
        ctx.set_materialize_grads(False)
        return tuple(outputs_T)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprobs_T: Tensor | None, by_entropy_T: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        targets_T, hidden_TD, head_VD, normaliser_T, entropy_T = ctx.saved_tensors
        hidden_gradient_TD = torch.empty_like(hidden_TD)
        sum_dtype = torch.promote_types(head_VD.dtype, torch.float32)
        head_gradient_VD = torch.zeros_like(head_VD, dtype=sum_dtype) if ctx.needs_input_grad[-1] else None
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden_CD = hidden_TD[rows]
            of_products_CV = _products_gradient(
                ctx.scale,
                hidden_CD @ head_VD.T,
                targets_T[rows],
                normaliser_C=normaliser_T[rows],
                by_logprobs_C=None if by_logprobs_T is None else by_logprobs_T[rows],
                entropy_C=None if by_entropy_T is None else (by_entropy_T[rows], entropy_T[rows]),
            )
            torch.mm(of_products_CV, head_VD, out=hidden_gradient_TD[rows])
            if head_gradient_VD is not None:
                _add_product(head_gradient_VD, of_products_CV, hidden_CD)
        head_gradient_VD = None if head_gradient_VD is None else head_gradient_VD.to(head_VD.dtype)
        return None, None, None, None, hidden_gradient_TD, head_gradient_VD


def _outputs(logits_CV: Tensor, targets_C: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
    """Return normalisers log sum_v exp z[v], log-probabilities, and entropies if asked for; overwrites the logits.

    H = log sum_v exp s[v] - sum_v s[v] exp s[v] / sum_v exp s[v],   s = z - max z
    """
    dtype = _wide(logits_CV)
    largest_C1 = logits_CV.amax(-1, keepdim=True).to(dtype)
    picked_CN = logits_CV.gather(-1, _by_place(targets_C)).to(dtype)
    shifted_CV = _minus(logits_CV, largest_C1)
    weight_CV = shifted_CV.exp() if with_entropy else shifted_CV.exp_()
    total_C = weight_CV.sum(-1)
    normaliser_C = largest_C1.squeeze(-1) + total_C.log()
    logprobs_C = (picked_CN - normaliser_C.unsqueeze(-1)).view(targets_C.shape)
    if not with_entropy:
        return normaliser_C, logprobs_C
    entropy_C = total_C.log() - weight_CV.mul_(shifted_CV).sum(-1) / total_C
    return normaliser_C, logprobs_C, entropy_C


def _products_gradient(
    scale: _Scale,
    products_CV: Tensor,
    targets_C: Tensor,
    *,
    normaliser_C: Tensor,
    by_logprobs_C: Tensor | None,
    entropy_C: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return [C, V] gradients by the head's products, which are overwritten, in their dtype.

    With the gradients g by the log-probabilities and h by the entropies H, and p = exp(z - normaliser):

        dL/dz[v] = sum_n g_n (1[v = y_n] - p[v]) - h p[v] (log p[v] + H)
    """
    logits_CV = scale.scaled(products_CV)
    bend_CV = scale.bend(logits_CV)
    logprobs_CV = _minus(logits_CV, normaliser_C.unsqueeze(-1))
    by_logprobs_CN = None if by_logprobs_C is None else _by_place(by_logprobs_C) / scale.temperature
    by_logprobs_C1 = None if by_logprobs_CN is None else by_logprobs_CN.sum(-1, keepdim=True)
    if entropy_C is None:
        assert by_logprobs_C1 is not None
        of_logits_CV = logprobs_CV.exp_().mul_(-by_logprobs_C1)
    else:
        by_entropy_C1, entropy_C1 = (one_C.unsqueeze(-1) for one_C in entropy_C)
        by_entropy_C1 = by_entropy_C1 / scale.temperature
        same_for_all_C1 = by_entropy_C1 * entropy_C1 + (0.0 if by_logprobs_C1 is None else by_logprobs_C1)
        of_logits_CV = logprobs_CV.exp()
        of_logits_CV.mul_(torch.addcmul(same_for_all_C1, logprobs_CV, by_entropy_C1, out=logprobs_CV)).neg_()
    if by_logprobs_CN is not None:
        of_logits_CV.scatter_add_(-1, _by_place(targets_C), by_logprobs_CN)
    return (of_logits_CV if bend_CV is None else of_logits_CV.mul_(bend_CV)).to(products_CV.dtype)


def _by_place(values_C: Tensor) -> Tensor:
    """Return [C, N] values: [C] values as [C, 1], [C, N] values as they are."""
    return values_C.unsqueeze(-1) if values_C.dim() == 1 else values_C


def _minus(logits_CV: Tensor, row_C1: Tensor) -> Tensor:
    """Subtract one number from each row. Logits with fewer bits than float32 become float32, others are overwritten."""
    return logits_CV.sub_(row_C1) if logits_CV.dtype == row_C1.dtype else logits_CV - row_C1


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(sum_VD: Tensor, of_products_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add gradient^T h to the sum; factors with fewer bits are multiplied as they are, and added in the type of the
    sum.
    """
    if of_products_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(of_products_CV.T, hidden_CD)
    else:
        sum_VD.add_(of_products_CV.T @ hidden_CD)
