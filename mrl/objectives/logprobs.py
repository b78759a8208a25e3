"""Log-probabilities of given tokens, and entropies, without ever holding the [T, V] logits of a whole microbatch.

Shapes: T tokens, C tokens of one chunk, D hidden width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ChunkOutputs: TypeAlias = tuple[Tensor, ...]
"""[C] each."""


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
) -> Tensor:
    """log pi(target_t) under the sampling distribution at `temperature`, in chunks of at most `chunk_tokens` tokens.

        l_t = z_t[y_t] / tau - logsumexp_v(z_t[v] / tau),   z_t = W h_t, or softcap * tanh(W h_t / softcap)

    The logits of a chunk are computed in the dtype of the hidden states, reduced in float32, freed, and computed anew
    in the backward pass, so that memory is O(C V). Temperature is applied because the engine's log-probabilities have
    it too. Gradient flows through `hidden_TD` and `head_VD`. Returns [T] float32.
    """
    softmax = _Softmax(temperature, softcap)
    (logprobs_T,) = _in_chunks(_logprobs, hidden_TD, head_VD, targets_T, softmax, chunk_tokens)
    return logprobs_T


def token_logprobs_and_entropy(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and from the same logits the entropy of the distribution that each token was drawn from.

        H_t = -sum_v p_t[v] log p_t[v] = logsumexp_v(z_t[v] / tau) - sum_v p_t[v] z_t[v] / tau

    Returns [T] float32 log-probabilities and [T] float32 entropies in nats, both with gradient.
    """
    softmax = _Softmax(temperature, softcap)
    logprobs_T, entropy_T = _in_chunks(_logprobs_and_entropy, hidden_TD, head_VD, targets_T, softmax, chunk_tokens)
    return logprobs_T, entropy_T


@dataclass(frozen=True, slots=True)
class _Softmax:
    temperature: float
    softcap: float | None

    def scaled(self, logits_CV: Tensor) -> Tensor:
        """[C, V] float32."""
        logits_CV = logits_CV.float()
        if self.softcap is not None:
            logits_CV = self.softcap * torch.tanh(logits_CV / self.softcap)
        return logits_CV / self.temperature


def _in_chunks(
    head: Callable[[Tensor, Tensor, Tensor, _Softmax], ChunkOutputs],
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    softmax: _Softmax,
    chunk_tokens: int,
) -> ChunkOutputs:
    chunks = zip(torch.split(hidden_TD, chunk_tokens), torch.split(targets_T, chunk_tokens), strict=True)
    pieces = [_chunk(head, hidden_CD, head_VD, targets_C, softmax) for hidden_CD, targets_C in chunks]
    return tuple(torch.cat(outputs) for outputs in zip(*pieces, strict=True))


def _chunk(
    head: Callable[[Tensor, Tensor, Tensor, _Softmax], ChunkOutputs],
    hidden_CD: Tensor,
    head_VD: Tensor,
    targets_C: Tensor,
    softmax: _Softmax,
) -> ChunkOutputs:
    if not (torch.is_grad_enabled() and (hidden_CD.requires_grad or head_VD.requires_grad)):
        return head(hidden_CD, head_VD, targets_C, softmax)
    outputs: ChunkOutputs = checkpoint(
        head, hidden_CD, head_VD, targets_C, softmax, use_reentrant=False, preserve_rng_state=False
    )
    return outputs


def _logprobs(hidden_CD: Tensor, head_VD: Tensor, targets_C: Tensor, softmax: _Softmax) -> ChunkOutputs:
    logits_CV = softmax.scaled(hidden_CD @ head_VD.T)
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return (picked_C - torch.logsumexp(logits_CV, dim=-1),)


def _logprobs_and_entropy(hidden_CD: Tensor, head_VD: Tensor, targets_C: Tensor, softmax: _Softmax) -> ChunkOutputs:
    logits_CV = softmax.scaled(hidden_CD @ head_VD.T)
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    normaliser_C = torch.logsumexp(logits_CV, dim=-1)
    mean_logit_C = (torch.softmax(logits_CV, dim=-1) * logits_CV).sum(-1)
    return picked_C - normaliser_C, normaliser_C - mean_logit_C
