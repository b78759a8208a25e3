"""One forward pass of a packed batch: the policy's log-probabilities and entropies of its answer tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from mrl.learner.packing import PackedBatch
from mrl.learner.ranks.context_group import ContextGroup
from mrl.models.heads import head_shape
from mrl.models.routing.router_replay import OWN
from mrl.models.row_attention import take
from mrl.objectives.logprobs import Kernel, token_logprobs, token_logprobs_and_entropy

CHUNK_LOGITS = 1 << 25
"""Default of `learner.chunk_logits` on a CPU: 128 MiB of float32."""


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """The temperature at which engines sample, and how many tokens have their logits in memory at once."""

    temperature: float
    chunk_tokens: int = 4096
    chunk_logits: int = CHUNK_LOGITS
    """Most logits of a chunk; a pass needs a few float32 arrays of that size."""
    kernel: Kernel = "chunked"
    context: ContextGroup | None = None
    """Ranks that share the places of a pass; None where each rank has passes of its own."""

    def tokens_at_once(self, vocab_size: int) -> int:
        """Return the number of tokens in a chunk."""
        return min(self.chunk_tokens, max(1, self.chunk_logits // vocab_size))


def answer_logprobs(model: nn.Module, batch: PackedBatch, settings: ForwardSettings) -> Tensor:
    """Return float32 log-probabilities of the batch's answer tokens at the sampling temperature, [T].

    The head is applied only to the places that predict an answer token, in chunks.
    """
    return _through(model, token_logprobs, batch, batch.target_ids_T, settings)


class AnswerValues(NamedTuple):
    """Results of one pass for the answer tokens of a batch, in nats, with gradient."""

    logprobs_T: Tensor
    entropy_T: Tensor | None
    """Entropies of the whole distributions in the tokens' places; None where not asked for."""
    unit_logprobs_TK: Tensor | None
    """Log-probabilities of the batch's units; None for a batch without units."""


def answer_values(
    model: nn.Module, batch: PackedBatch, settings: ForwardSettings, *, with_entropy: bool
) -> AnswerValues:
    """Return `answer_logprobs` and, from the same logits, those of units and, if asked for, entropies; float32."""
    units_TK = batch.unit_ids_TK
    ids = batch.target_ids_T if units_TK is None else torch.cat([batch.target_ids_T.unsqueeze(-1), units_TK], -1)
    score = token_logprobs_and_entropy if with_entropy else token_logprobs
    found = _through(model, score, batch, ids, settings)
    logprobs, entropy_T = found if with_entropy else (found, None)
    if units_TK is None:
        return AnswerValues(logprobs, entropy_T, None)
    return AnswerValues(logprobs[:, 0], entropy_T, logprobs[:, 1:])


@torch.no_grad()
def frozen_logprobs(model: nn.Module, batches: Sequence[PackedBatch], settings: ForwardSettings) -> list[Tensor]:
    """Return `answer_logprobs` without gradient, [T] per batch."""
    return [answer_logprobs(model, batch, settings) for batch in batches]


def enter_by_answers(model: nn.Module) -> None:
    """Let a sharded model gather its parameters for the passes of this module, as it does for its own forward.

    The head's weight is a shard too: a product with it outside of the wrapped forward would miss the other ranks'
    parts, or give them no gradient (huggingface/trl#7245).
    """
    model.answer_outputs = MethodType(_answer_outputs, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "answer_outputs")


def _through(model: Any, score: Callable[..., Any], batch: PackedBatch, ids: Tensor, settings: ForwardSettings) -> Any:
    if isinstance(model, FSDPModule):
        return model.answer_outputs(score, batch, ids, settings)  # type: ignore[attr-defined]
    return _answer_outputs(model, score, batch, ids, settings)


def _answer_outputs(
    model: Any, score: Callable[..., Any], batch: PackedBatch, ids: Tensor, settings: ForwardSettings
) -> Any:
    """Score `ids`: [T], or [T, N] with N ids in the place of each token."""
    context = settings.context
    told_LNK = None if batch.experts_LNK is None else batch.experts_LNK.to(batch.input_ids_L.device)
    if context is None:
        told = {} if told_LNK is None else {"chosen_experts": told_LNK}
        hidden_LD = _hidden(model, batch.input_ids_L, batch.position_ids_L, packed_rows=batch.rows, **told)
        return _scored(model, score, take(hidden_LD, batch.predict_at_T), ids, settings)
    ids_l, positions_l = (context.own_places(values_L) for values_L in (batch.input_ids_L, batch.position_ids_L))
    told = {} if told_LNK is None else {"chosen_experts": context.own_places(told_LNK, beyond=OWN)}
    hidden_lD = _hidden(model, ids_l, positions_l, packed_rows=batch.rows, place_exchange=context, **told)
    index_t, at_t = context.own_tokens(batch.predict_at_T, batch.rows.num_places)
    found = _scored(model, score, take(hidden_lD, at_t), ids[index_t], settings)
    num_tokens = len(batch.target_ids_T)
    if isinstance(found, Tensor):
        return context.of_all(found, index_t, num_tokens)
    return tuple(context.of_all(values_t, index_t, num_tokens) for values_t in found)


def _hidden(model: Any, input_ids: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
    """Return the last hidden states, [places, D]."""
    hidden_NLD: Tensor = model.get_decoder()(
        input_ids=input_ids.unsqueeze(0), position_ids=position_ids.unsqueeze(0), use_cache=False, **attention
    ).last_hidden_state
    return hidden_NLD[0]


def _scored(model: Any, score: Callable[..., Any], hidden_TD: Tensor, ids: Tensor, settings: ForwardSettings) -> Any:
    shape, head_VD = head_shape(model), model.get_output_embeddings().weight
    return score(
        hidden_TD,
        head_VD,
        ids,
        temperature=settings.temperature * shape.divisor,
        softcap=None if shape.softcap is None else shape.softcap * shape.divisor,
        chunk_tokens=settings.tokens_at_once(head_VD.shape[0]),
        kernel=settings.kernel,
    )
