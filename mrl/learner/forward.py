"""One forward pass of a packed batch: what the policy gives to the answer tokens in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mrl.learner.packing import PackedBatch
from mrl.objectives.logprobs import token_logprobs, token_logprobs_and_entropy


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """The distribution that engines sample from, and how many tokens have their logits in memory at once."""

    temperature: float
    chunk_tokens: int = 4096


def answer_logprobs(model: nn.Module, batch: PackedBatch, settings: ForwardSettings) -> Tensor:
    """[T] float32 log-probabilities of the batch's answer tokens under the sampling temperature.

    The head is applied to the places that predict an answer token only, in chunks.
    """
    return token_logprobs(
        *_head_inputs(model, batch), temperature=settings.temperature, chunk_tokens=settings.chunk_tokens
    )


def answer_logprobs_and_entropy(
    model: nn.Module, batch: PackedBatch, settings: ForwardSettings
) -> tuple[Tensor, Tensor]:
    """`answer_logprobs`, and [T] float32 entropies in nats of the distributions that the tokens were drawn from."""
    return token_logprobs_and_entropy(
        *_head_inputs(model, batch), temperature=settings.temperature, chunk_tokens=settings.chunk_tokens
    )


@torch.no_grad()
def frozen_logprobs(model: nn.Module, batches: Sequence[PackedBatch], settings: ForwardSettings) -> list[Tensor]:
    """`answer_logprobs` without gradient, [T] per batch."""
    return [answer_logprobs(model, batch, settings) for batch in batches]


def _head_inputs(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """[T, D] hidden states that predict the answer tokens, [V, D] the head, [T] the tokens."""
    hidden_NLD = model.get_decoder()(  # type: ignore[operator]
        input_ids=batch.input_ids_NL, position_ids=batch.position_ids_NL, use_cache=False
    ).last_hidden_state
    head_VD = model.get_output_embeddings().weight  # type: ignore[operator]
    return hidden_NLD.flatten(0, 1)[batch.predict_at_T], head_VD, batch.target_ids_T
