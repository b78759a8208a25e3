"""What every rank of a learner does with a step order: pack its share, forward, backward, update, diagnose."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mrl.config.schema import LearnerTable
from mrl.errors import ModelFolderError
from mrl.learner.imitated import Float32s, ImitatedLogprobs
from mrl.learner.order import StepOrder, split_minibatches
from mrl.learner.packing import PackedBatch, pack
from mrl.learner.step import StepSettings, answer_logprobs, proximal_logprobs, update
from mrl.learner.world import World
from mrl.models.scoring import score_tokens
from mrl.objectives.diagnostics import clipped_tokens, k3_nats, ratios, sampled_entropy_nats
from mrl.sharing.regime import Component, TrainingExample

HEAD_TOLERANCE_NATS = 1e-2


class Trainer:
    """Model and optimizer of one rank. Every rank holds all parameters; rows are dealt out, gradients are summed."""

    def __init__(
        self,
        model: nn.Module,
        table: LearnerTable,
        components: Sequence[Component],
        *,
        temperature: float,
        seed: int,
        total_steps: int,
        world: World,
    ) -> None:
        # Dropout would make the learner's log-probabilities differ from the engine's, so it stays off in training.
        self.model, self.world = model.eval(), world
        self._table, self._components = table, tuple(components)
        self._settings = StepSettings(
            clip_low=table.clip_low,
            clip_high=table.clip_high,
            max_behaviour_weight=table.max_behaviour_weight,
            max_grad_norm=table.max_grad_norm,
            temperature=temperature,
        )
        self._seed, self._total_steps = seed, total_steps
        self.imitated: dict[int, Float32s] = {}
        """Of the last step: place among its examples -> log-probs of an imitated row."""
        self.optimizer = AdamW(model.parameters(), lr=table.lr, betas=table.betas, weight_decay=table.weight_decay)

    def train(self, order: StepOrder, step: int) -> dict[str, float]:
        """All updates of one step; returns its metrics, the same on every rank."""
        lr = learning_rate(self._table.lr, self._table.lr_final_share, step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rng = np.random.default_rng([self._seed, step])
        parts = split_minibatches(order, self._table.minibatches, rng)
        batches = [self._pack(part) for part in parts]
        proximal = None
        if len(parts) > 1:
            proximal = [proximal_logprobs(self.model, group, self._settings) for group in batches]
        values: dict[str, float] = {}
        tally = Tally(self._components, self._settings, self.world)
        imitated = ImitatedLogprobs(order, self._components, self.world)
        for index, part in enumerate(parts):
            own = None if proximal is None else proximal[index]
            result, seen = update(
                self.model,
                self.optimizer,
                batches[index],
                own,
                self._components,
                part.denominators,
                self._settings,
                self.world,
                num_rows=len(part.examples),
            )
            for name, value in result.items():
                values[name] = values.get(name, 0.0) + value / len(parts)
            tally.add(batches[index], seen, seen if own is None else own)
            imitated.add(part, batches[index], seen)
        self.imitated = imitated.values()
        return values | tally.values() | {"optim/lr": lr}

    def _pack(self, part: StepOrder) -> list[PackedBatch]:
        batches = pack(
            part.examples,
            self._components,
            pack_tokens=self._table.pack_tokens,
            microbatch_tokens=self._table.microbatch_tokens,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return [batch.to(self.world.device) for batch in batches]


def learning_rate(first: float, final_share: float, step: int, total_steps: int) -> float:
    """`first` at step 0, in a straight line to `final_share * first` at the last of `total_steps` steps."""
    progress = step / (total_steps - 1) if total_steps > 1 else 0.0
    return first * (1.0 - (1.0 - final_share) * min(1.0, progress))


@torch.no_grad()
def check_head(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> None:
    """Score fixed sequences as training does and as the model itself does.

    Raises ModelFolderError when they differ, which a head with a bias, soft-capping or scaling would make them do.
    """
    rows = [_as_row(np.asarray(ids, dtype=np.int32)) for ids in token_ids]
    component = Component(rows[0].component, "imitation", 1.0, "rows")
    (batch,) = pack(rows, [component], pack_tokens=32, microbatch_tokens=1_000_000)
    settings = StepSettings(clip_low=0.2, clip_high=0.2, max_behaviour_weight=1.0, max_grad_norm=1.0, temperature=1.0)
    device = next(model.parameters()).device
    trained = answer_logprobs(model, batch.to(device), settings).sort().values
    served = torch.tensor(score_tokens(model, token_ids), device=device).flatten().sort().values
    if not torch.allclose(trained, served, atol=HEAD_TOLERANCE_NATS):
        gap = float((trained - served).abs().max())
        raise ModelFolderError(
            "the head of this model is more than a matrix (a bias, soft-capping or scaling)",
            got=f"log-probabilities off by {gap:.2g} nats",
            cure="take a model whose logits are hidden states times the head's weight",
        )


def _as_row(token_ids: npt.NDArray[np.int32]) -> TrainingExample:
    zeros = np.zeros(token_ids.size - 1, dtype=np.float32)
    return TrainingExample(token_ids[:1], token_ids[1:], "canary", zeros, zeros, None, "canary", "canary")


class Tally:
    """Sums of per-token diagnostics over the policy-gradient tokens of a step and over all ranks."""

    def __init__(self, components: Sequence[Component], settings: StepSettings, world: World) -> None:
        self._own = [i for i, component in enumerate(components) if component.objective == "policy_gradient"]
        self._settings, self._world = settings, world
        self._sums = torch.zeros(5, device=world.device)
        self._largest = torch.zeros(1, device=world.device)

    @torch.no_grad()
    def add(self, batches: Sequence[PackedBatch], logprobs: Sequence[Tensor], proximal: Sequence[Tensor]) -> None:
        """Count one update."""
        for batch, logprobs_T, proximal_T in zip(batches, logprobs, proximal, strict=True):
            own = torch.isin(batch.component_T, torch.tensor(self._own, device=batch.component_T.device))
            now, start, behaviour = logprobs_T[own], proximal_T[own], batch.behaviour_logprobs_T[own]
            clipped = clipped_tokens(
                now,
                start,
                batch.advantages_T[own],
                clip_low=self._settings.clip_low,
                clip_high=self._settings.clip_high,
            )
            sums = [
                torch.tensor(float(own.sum())),
                torch.tensor(float(len(own))),
                sampled_entropy_nats(behaviour).sum(),
                clipped.sum(),
                k3_nats(start, behaviour).sum(),
            ]
            self._sums += torch.stack([value.to(self._sums) for value in sums])
            if len(start):
                self._largest = torch.maximum(self._largest, ratios(start, behaviour).max())

    def values(self) -> dict[str, float]:
        """Means over tokens, after summing over ranks."""
        own, trained, surprisal, clipped, k3 = self._world.sum_values(self._sums).tolist()
        per_token = 1.0 / own if own else 0.0
        return {
            "tokens/trained": trained,
            "entropy/sampled_nats": surprisal * per_token,
            "ratio/clip_share": clipped * per_token,
            "mismatch/k3_nats": k3 * per_token,
            "mismatch/max_ratio": float(self._world.max_values(self._largest)),
        }
