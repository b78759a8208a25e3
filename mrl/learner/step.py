"""One optimizer update: forward and backward over packed batches, gradients summed over ranks, a clipped AdamW step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mrl.learner.forward import ForwardSettings, answer_values, frozen_logprobs
from mrl.learner.loss import (
    TokenValues,
    behaviour_by_token,
    component_losses,
    needs_entropy,
    needs_reference,
    shares,
    teacher_by_token,
)
from mrl.learner.packing import PackedBatch
from mrl.learner.ranks.world import World
from mrl.learner.sharding import is_wrapped, sum_over_replicas
from mrl.learner.step_timing import PhaseClock
from mrl.models.lora import adapters_off
from mrl.sharing.regime import Component


class Updater:
    """Makes the optimizer updates of one rank.

    The reference of a KL penalty is a frozen model, or the model itself without its adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        components: Sequence[Component],
        world: World,
        *,
        forward: ForwardSettings,
        max_grad_norm: float,
        reference: nn.Module | None,
        has_adapters: bool = False,
    ) -> None:
        self.clock = PhaseClock(world.device, world.note)
        self._model, self._optimizer, self._components, self._world = model, optimizer, components, world
        self._forward, self._max_grad_norm = forward, max_grad_norm
        # Ranks that share the places of a pass have the same losses: only the first one counts them.
        self._counts = forward.context is None or forward.context.rank == 0
        self._with_entropy = needs_entropy(components)
        self._reference = reference
        self._needs_reference, self._has_adapters = needs_reference(components), has_adapters

    def update(
        self,
        batches: Sequence[PackedBatch],
        proximal: Sequence[Tensor] | None,
        denominators: Mapping[str, float],
        *,
        update_index: int,
        num_rows: int,
    ) -> tuple[dict[str, float], list[TokenValues]]:
        """Make one update over this rank's batches; `num_rows` counts the rows of all ranks that have any weight.

        `proximal` None says that the parameters are still those of the start of the step: the log-probabilities of this
        very forward are the proximal ones, and a second forward is saved. Returns loss values (the same on every rank)
        and, per batch, the detached values of its tokens.
        """
        self._optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(len(self._components), device=self._world.device)
        factors = shares(self._components, denominators)
        seen = []
        for index, batch in enumerate(batches):
            with self.clock.phase("forward"):
                values = self._values(batch, None if proximal is None else proximal[index])
                losses = component_losses(values, batch, self._components, update_index)
                scaled = torch.stack([factor * loss for factor, loss in zip(factors, losses, strict=True)])
            sum_over_replicas(self._model, is_due=index == len(batches) - 1)
            with self.clock.phase("backward"):
                scaled.sum().backward()
            if self._counts:
                totals += scaled.detach()
            seen.append(values.detached())
        with self.clock.phase("update"):
            if not is_wrapped(self._model):
                self._world.sum_gradients(self._model)
            return self._apply(totals, num_rows), seen

    def _values(self, batch: PackedBatch, proximal_T: Tensor | None) -> TokenValues:
        # First: no activations are kept yet, and a sharded model may not be entered again before its backward pass.
        reference_T = self._reference_logprobs(batch) if self._needs_reference else None
        found = answer_values(self._model, batch, self._forward, with_entropy=self._with_entropy)
        proximal_T = found.logprobs_T.detach() if proximal_T is None else proximal_T
        return TokenValues(
            found.logprobs_T,
            proximal_T,
            behaviour_by_token(batch, self._components, proximal_T),
            teacher_by_token(batch, self._components, proximal_T),
            reference_T,
            found.entropy_T,
            found.unit_logprobs_TK,
        )

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        if self._reference is not None:
            return frozen_logprobs(self._reference, [batch], self._forward)[0]
        assert self._has_adapters, "the trainer sees to it that there is a reference"
        with adapters_off(self._model):
            return frozen_logprobs(self._model, [batch], self._forward)[0]

    def _apply(self, totals: Tensor, num_rows: int) -> dict[str, float]:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._world.sum_values(totals)
        finite = bool(torch.isfinite(norm) & torch.isfinite(totals).all())
        if finite and num_rows:  # without rows, momentum alone would move the parameters
            self._optimizer.step()
        values = {f"loss/{c.name}": float(total) for c, total in zip(self._components, totals, strict=True)}
        return values | {
            "loss/total": float(totals.sum()),
            "optim/grad_norm": float(norm),
            "optim/skipped": 1.0 - finite,
        }
