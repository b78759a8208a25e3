"""Log-probabilities of given tokens without ever holding the [T, V] logits of a whole microbatch.

Shapes: T tokens, C tokens of one chunk, D hidden width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, *, temperature: float, chunk_tokens: int
) -> Tensor:
    """log pi(target_t) under the sampling distribution at `temperature`, in chunks of at most `chunk_tokens` tokens.

        l_t = z_t[y_t] / tau - logsumexp_v(z_t[v] / tau),   z_t = W h_t

    The logits of a chunk are computed in the dtype of the hidden states, reduced in float32, freed, and computed anew
    in the backward pass, so that memory is O(C V). Temperature is applied because the engine's log-probabilities have
    it too. Gradient flows through `hidden_TD` and `head_VD`. Returns [T] float32.
    """
    pieces = [
        _chunk(hidden_CD, head_VD, targets_C, temperature)
        for hidden_CD, targets_C in zip(
            torch.split(hidden_TD, chunk_tokens), torch.split(targets_T, chunk_tokens), strict=True
        )
    ]
    return torch.cat(pieces)


def _chunk(hidden_CD: Tensor, head_VD: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
    if not (torch.is_grad_enabled() and (hidden_CD.requires_grad or head_VD.requires_grad)):
        return _chunk_logprobs(hidden_CD, head_VD, targets_C, temperature)
    result: Tensor = checkpoint(
        _chunk_logprobs, hidden_CD, head_VD, targets_C, temperature, use_reentrant=False, preserve_rng_state=False
    )
    return result


def _chunk_logprobs(hidden_CD: Tensor, head_VD: Tensor, targets_C: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CD @ head_VD.T).float() / temperature
    picked_C = logits_CV.gather(-1, targets_C.unsqueeze(-1)).squeeze(-1)
    return picked_C - torch.logsumexp(logits_CV, dim=-1)
