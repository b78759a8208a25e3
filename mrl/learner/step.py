"""One learner step: forward and backward over packed batches, one clipped AdamW update per minibatch.

The loss is a sum over components c of

    coefficient_c / D_c * sum over rows, tokens of weight_t * term_t

with D_c known before the first backward, so that any split into microbatches or ranks gives the same gradient: every
part adds its share, and gradients are summed, never averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mrl.learner.packing import PackedBatch
from mrl.learner.world import World
from mrl.objectives.clipped import behaviour_weight, clipped_surrogate
from mrl.objectives.imitation import imitation
from mrl.objectives.logprobs import token_logprobs
from mrl.sharing.regime import Component


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Numbers of the update; see the learner table of the configuration."""

    clip_low: float
    clip_high: float
    max_behaviour_weight: float
    max_grad_norm: float
    temperature: float
    chunk_tokens: int = 4096


def answer_logprobs(model: nn.Module, batch: PackedBatch, settings: StepSettings) -> Tensor:
    """[T] float32 log-probabilities of the batch's answer tokens under the sampling temperature.

    The head is applied to the places that predict an answer token only, in chunks.
    """
    hidden_NLD = model.get_decoder()(  # type: ignore[operator]
        input_ids=batch.input_ids_NL, position_ids=batch.position_ids_NL, use_cache=False
    ).last_hidden_state
    hidden_TD = hidden_NLD.flatten(0, 1)[batch.predict_at_T]
    head_VD = model.get_output_embeddings().weight  # type: ignore[operator]
    return token_logprobs(
        hidden_TD, head_VD, batch.target_ids_T, temperature=settings.temperature, chunk_tokens=settings.chunk_tokens
    )


def component_losses(
    logprobs_T: Tensor, proximal_T: Tensor, batch: PackedBatch, components: Sequence[Component], settings: StepSettings
) -> list[Tensor]:
    """Per component the weighted sum of its terms, not yet divided: a scalar with gradient each, exact 0 if absent."""
    losses = []
    for index, component in enumerate(components):
        mine = batch.component_T == index
        own_T = logprobs_T[mine]
        if component.objective == "imitation":
            term_T = imitation(own_T)
        else:
            surrogate_T = clipped_surrogate(
                own_T,
                proximal_T[mine],
                batch.advantages_T[mine],
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
            )
            weight_T = behaviour_weight(
                proximal_T[mine], batch.behaviour_logprobs_T[mine], cap=settings.max_behaviour_weight
            )
            term_T = weight_T * surrogate_T
        losses.append((batch.weights_T[mine] * term_T).sum())
    return losses


@torch.no_grad()
def proximal_logprobs(model: nn.Module, batches: Sequence[PackedBatch], settings: StepSettings) -> list[Tensor]:
    """Log-probabilities under the parameters at the start of the step (decoupled PPO), [T] per batch."""
    return [answer_logprobs(model, batch, settings) for batch in batches]


def update(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    proximal: Sequence[Tensor] | None,
    components: Sequence[Component],
    denominators: Mapping[str, float],
    settings: StepSettings,
    world: World,
    *,
    num_rows: int,
) -> tuple[dict[str, float], list[Tensor]]:
    """One optimizer update over this rank's batches; `num_rows` counts the rows of all ranks.

    `proximal` None says that the parameters are still those of the start of the step: the log-probabilities of this
    very forward are the proximal ones, and a second forward is saved. Returns loss values (the same on every rank) and
    the detached log-probabilities per batch.
    """
    optimizer.zero_grad(set_to_none=True)
    totals = torch.zeros(len(components), device=world.device)
    seen: list[Tensor] = []
    for index, batch in enumerate(batches):
        logprobs_T = answer_logprobs(model, batch, settings)
        seen.append(logprobs_T.detach())
        proximal_T = seen[-1] if proximal is None else proximal[index]
        losses = component_losses(logprobs_T, proximal_T, batch, components, settings)
        scaled = [_share(c, denominators) * loss for c, loss in zip(components, losses, strict=True)]
        torch.stack(scaled).sum().backward()
        totals += torch.stack(scaled).detach()
    world.sum_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    world.sum_values(totals)
    finite = bool(torch.isfinite(norm))
    if finite and num_rows:  # without rows, momentum alone would move the parameters
        optimizer.step()
    values = {f"loss/{component.name}": float(total) for component, total in zip(components, totals, strict=True)}
    return values | {
        "loss/total": float(totals.sum()),
        "optim/grad_norm": float(norm),
        "optim/skipped": 1.0 - finite,
    }, seen


def _share(component: Component, denominators: Mapping[str, float]) -> float:
    denominator = denominators[component.name]
    return component.coefficient / denominator if denominator else 0.0
