"""Training of one step on one rank of a learner: pack its share of the rows, forward, backward, update, diagnostics."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from mrl.config.policy_tables import LearnerTable
from mrl.errors import ConfigError, ModelFolderError
from mrl.learner.forward import ForwardSettings, answer_logprobs, frozen_logprobs
from mrl.learner.loss import needs_reference
from mrl.learner.packing import PackedBatch, pack
from mrl.learner.peer_logprobs import Float32s, PeerLogprobs
from mrl.learner.piecewise_adamw import PiecewiseAdamW
from mrl.learner.ranks.context_group import ContextGroup, context_group
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.learner.step import Updater
from mrl.learner.step_order import StepOrder, split_minibatches
from mrl.learner.step_timing import peak_flops, peak_memory_mib, training_flops
from mrl.learner.token_diagnostics import TokenDiagnostics
from mrl.models.compiled_blocks import as_written
from mrl.models.device_memory import OffDevice
from mrl.models.heads import head_shape
from mrl.models.lora import add_adapters
from mrl.models.number_formats import NumberFormat
from mrl.models.routing.router_replay import RouterReplay
from mrl.models.row_attention import attention_of_transformers
from mrl.models.scoring import writes_in_forwards
from mrl.models.varlen_proof import heads_of, prove_varlen
from mrl.objectives.liger import check_liger
from mrl.objectives.logprobs import Kernel
from mrl.objectives.specs import Imitation
from mrl.sharing.regime import Component, TrainingExample
from mrl.weights.canary import excess, reference_logprobs, rounded_logprobs

log = structlog.get_logger()


class Trainer:
    """Model and optimizer of one rank. Rows are dealt out to ranks, gradients are summed, `place` puts the parameters.

    `reference` is a frozen copy of the policy at the start of the run, needed where `needs_reference(components)`; a
    learner of adapters has it in its model already.
    """

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
        reference: nn.Module | None = None,
    ) -> None:
        has_reference = reference is not None or table.lora is not None
        assert has_reference or not needs_reference(components), "a component is held to a reference policy"
        if table.lora is not None:
            add_adapters(model, table.lora, seed=seed)
        if table.logprob_kernel == "liger":
            check_liger(world.device, head_shape(model).softcap)
        table = table.model_copy(update={"attention_kernel": agreed_kernel(table.attention_kernel, model, world)})
        self._replay = RouterReplay(model) if table.router_replay else None
        if table.router_replay and reference is not None:
            RouterReplay(reference)
        # Dropout would make the learner's log-probabilities differ from the engine's, so it stays off in training.
        self.model, self.world = place(model.eval(), table, world), world
        self._table, self._components = table, tuple(components)
        if table.context_parallel > 1 and writes_in_forwards(model):
            raise ModelFolderError(
                "learner.context_parallel: this model's rotary frequencies depend on the row length",
                got="rope type longrope or dynamic",
                wanted="rotary frequencies that do not depend on the row length",
                cure="remove learner.context_parallel",
            )
        self.context = context_group(world, table.context_parallel)
        self._counts = self.context is None or self.context.rank == 0  # the others have the same values
        self._forward = ForwardSettings(
            temperature, chunk_logits=table.chunk_logits, kernel=table.logprob_kernel, context=self.context
        )
        self.precision: NumberFormat = table.precision
        self.kernel: Kernel = table.logprob_kernel
        self._places = 0
        self._seed, self._total_steps = seed, total_steps
        self.peer_logprobs: dict[int, Float32s] = {}
        """Place among the last step's examples -> [T] own log-probabilities of a row that a peer wrote or scored."""
        self.optimizer = _optimizer(self.model, table)
        self._off_device = OffDevice()
        self._reference = None if reference is None else place(reference.eval().requires_grad_(False), table, world)
        self._updater = Updater(
            self.model,
            self.optimizer,
            self._components,
            world,
            forward=self._forward,
            max_grad_norm=table.max_grad_norm,
            reference=self._reference,
            has_adapters=table.lora is not None,
        )

    def at_each_phase(self, act: Callable[[], None]) -> None:
        """Have `act` called at the beginning of every pack, forward, backward and update: training goes on."""
        self._updater.clock.on_phase = act

    def train(self, order: StepOrder, step: int) -> dict[str, float]:
        """Make all updates of one step; return its metrics, the same on every rank."""
        lr = learning_rate(self._table, step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rng = np.random.default_rng([self._seed, step])
        parts = split_minibatches(order, self._table.minibatches, rng)
        with self._updater.clock.phase("pack"):
            packed = [self._pack(part) for part in parts]
        self._places = sum(len(batch.input_ids_L) for batches in packed for batch in batches)
        # The first update starts from the parameters of the step's start, so that its own forward is the proximal one.
        with self._updater.clock.phase("forward"):
            proximal = [None, *(frozen_logprobs(self.model, batches, self._forward) for batches in packed[1:])]
        losses: dict[str, float] = {}
        tally = TokenDiagnostics(self._components, self.world)
        of_peers = PeerLogprobs(order, self._components, self.world)
        for index, (part, batches) in enumerate(zip(parts, packed, strict=True)):
            num_rows = sum(bool(row.weights.any()) for row in part.examples)  # others only keep a place
            result, seen = self._updater.update(
                batches, proximal[index], part.denominators, update_index=index, num_rows=num_rows
            )
            for name, value in result.items():
                losses[name] = losses.get(name, 0.0) + value / len(parts)
            if self._counts:
                tally.add(batches, seen, index)
                of_peers.add(part, batches, [values.logprobs_T for values in seen])
        self.peer_logprobs = of_peers.values()
        losses |= tally.values() | self._of_replay(order)
        return losses | {"optim/lr": lr, "optim/updates": float(len(parts))}

    def _of_replay(self, order: StepOrder) -> dict[str, float]:
        """Return metrics of router replay: share of replayed tokens, and of choices that routers would change."""
        if self._replay is None:
            return {}
        shape = self._replay.shape
        counts = torch.tensor(self._replay.take_counts(), dtype=torch.float64, device=self.world.device)
        told, other = self.world.sum_values(counts).tolist()
        own = {component.name for component in self._components if component.rows == "own"}
        rows = [row for row in order.examples if row.component in own]
        fitting = [row for row in rows if row.experts is not None and shape.fits(row.experts, row.num_trained_tokens)]
        replayed, num_tokens = (sum(row.num_trained_tokens for row in some) for some in (fitting, rows))
        return {
            "routing/replayed_share": replayed / num_tokens if num_tokens else 0.0,
            "routing/otherwise_share": other / told if told else 0.0,
        }

    def take_measurements(self, order: StepOrder) -> dict[str, float]:
        """Return seconds by phase of the last step, by this rank's clock, peak memory in MiB and use of the device."""
        spent_s = self._updater.clock.take()
        values = {f"time/{name}_s": seconds for name, seconds in spent_s.items()}
        values["memory/learner_peak_mib"] = peak_memory_mib(self.world.device)
        peak = peak_flops(self.world.device)
        if peak is not None and (busy_s := sum(spent_s.values())):
            places = self._places * self.world.size // self._table.context_parallel  # passes are about equally full
            flops = training_flops(self.model, order.examples, places) / self.world.size
            values["rate/mfu"] = flops / busy_s / peak
        return values

    def leave_device(self) -> None:
        """Move parameters, moments and the reference to main memory, between two steps, and drop gradients.

        Tensors that are in main memory anyway stay. Nothing may be computed before `come_to_device`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._off_device.leave(tensor for tensor in self.held() if tensor.device.type != "cpu")

    def held(self) -> list[Tensor]:
        """Return all tensors that stay between two steps, except gradients."""
        models = [self.model] if self._reference is None else [self.model, self._reference]
        held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        held += [one for state in self.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
        return held

    def come_to_device(self) -> None:
        """Move all of that back to the device, bit for bit."""
        self._off_device.come_back()

    def _pack(self, part: StepOrder) -> list[PackedBatch]:
        batches = pack(
            part.examples,
            self._components,
            microbatch_tokens=self._table.microbatch_tokens,
            rank=self.world.rank // self._table.context_parallel,
            world_size=self.world.size // self._table.context_parallel,
            routing=None if self._replay is None else self._replay.shape,
        )
        return [batch.to(self.world.device) for batch in batches]


def agreed_kernel(wanted: str, model: nn.Module, world: World) -> str:
    """Return the attention kernel of all ranks: for "auto" the varlen kernel, where every rank proves it.

    The log says which. Raises ConfigError where "varlen" is wanted and cannot be had.
    """
    if wanted == "rows":
        return wanted
    reason = ""
    try:
        prove_varlen(world.device, heads_of(model.config))  # type: ignore[arg-type]
    except ConfigError as error:
        if wanted == "varlen":
            raise
        reason = str(error)
    chosen = "rows" if world.any(bool(reason)) else "varlen"
    say = log.warning if chosen == "rows" else log.info
    say(
        "attention kernel selected",
        chosen=chosen,
        reason=reason or ("not available on another rank" if chosen == "rows" else "verified"),
    )
    return chosen


def _optimizer(model: nn.Module, table: LearnerTable) -> AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": table.lr, "betas": table.betas, "weight_decay": table.weight_decay}
    of_float32 = table.optimizer_dtype == "float32" and all(one.dtype == torch.float32 for one in trained)
    if table.optimizer_memory == "device" and of_float32:
        return AdamW(trained, **settings, fused=True)
    dtype: torch.dtype = getattr(torch, table.optimizer_dtype)
    return PiecewiseAdamW(trained, **settings, on_host=table.optimizer_memory == "host", dtype=dtype)


def learning_rate(table: LearnerTable, step: int, total_steps: int) -> float:
    """Return the learning rate of a step.

    It rises linearly to `lr` over the warm-up, and then falls to `lr_final_share * lr` at the last step. Without a
    warm-up, step 0 has `lr`.
    """
    if step < table.warmup_steps:
        return table.lr * (step + 1) / table.warmup_steps
    falling_steps = total_steps - 1 - table.warmup_steps
    progress = min(1.0, (step - table.warmup_steps) / falling_steps) if falling_steps > 0 else 0.0
    fallen = progress if table.lr_schedule == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
    return table.lr * (1.0 - (1.0 - table.lr_final_share) * fallen)


@torch.no_grad()
def check_forward(
    model: nn.Module,
    token_ids: Sequence[Sequence[int]],
    precision: NumberFormat = "float32",
    kernel: Kernel = "chunked",
    context: ContextGroup | None = None,
) -> None:
    """Check that training scores sequences as transformers' own model does, in the same number format.

    Ranks of a `context` do it together, as they train.

    The second half of every sequence is an answer to its first half. A second answer, which shares that prompt, is the
    second half of another sequence. Raises ModelFolderError when training is off by more than rounding changes the
    model itself: as with a head that has a bias, or is of a family that `models.heads` does not know, or with an
    attention that is more than causal.
    """
    prompts, ends = [ids[: len(ids) // 2] for ids in token_ids], [ids[len(ids) // 2 :] for ids in token_ids]
    pairs = [(prompts[i], ends[j]) for i in range(len(prompts)) for j in (i, (i + 1) % len(prompts))]
    rows = [_as_row(np.asarray(prompt, dtype=np.int32), np.asarray(end, dtype=np.int32)) for prompt, end in pairs]
    (batch,) = pack(rows, [Component("canary", Imitation(), 1.0, "rows", "own")], microbatch_tokens=1_000_000)
    settings = ForwardSettings(1.0, kernel=kernel, context=context)
    with as_written():
        trained_T = answer_logprobs(model, batch.to(_device(model)), settings).cpu().numpy()
    sequences = [[*prompt, *end] for prompt, end in pairs]
    with attention_of_transformers(model):
        exact, rounded = (score(model, sequences, precision) for score in (reference_logprobs, rounded_logprobs))
    answers = [(row, len(pairs[row][0]) - 1) for row in _in_order(batch.row_T)]
    exact_T, rounded_T = (
        np.concatenate([scored[row][start:] for row, start in answers]) for scored in (exact, rounded)
    )
    if problem := excess(trained_T - exact_T, rounded_T - exact_T):
        raise ModelFolderError(
            "the training forward does not match the model's own forward",
            got=f"log-probabilities differ: {problem}",
            cure="use a model whose logits are hidden states times the head's weight, at most soft-capped or scaled",
        )


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _in_order(row_T: Tensor) -> list[int]:
    """Return the rows of a batch in the order in which they come."""
    return list(dict.fromkeys(row_T.tolist()))


def _as_row(prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32]) -> TrainingExample:
    zeros = np.zeros(answer.size, dtype=np.float32)
    return TrainingExample(prompt, answer, "canary", zeros, zeros, None, "canary", "canary")
