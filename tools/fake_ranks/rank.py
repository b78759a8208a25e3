"""The first rank of a learner among ranks that never answer: it places a model and trains one step, without data.

The process group is torch's "fake" one, whose collectives return at once; tensors have shapes alone (FakeTensorMode).
The rest is the code of a learner: `place` with FSDP2, packing, `Trainer`, AdamW. A process can be one such rank at a
time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from fake_ranks.watched import BETWEEN, Phase, Watched
from mrl.config.policy_tables import LearnerTable
from mrl.learner import piecewise_adamw
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.step_timing import training_flops
from mrl.learner.trainer import Trainer
from mrl.memory_plan.pass_memory import without_data
from mrl.models.parameters import weight_sources
from mrl.models.size import Microbatch
from mrl.models.skeleton import skeleton
from mrl.objectives.specs import Clipped, Correction
from mrl.sharing.regime import Component, TrainingExample

OWN = Component("own", Clipped(0.2, 0.2, correction=Correction("token", "truncate", 0.0, 5.0)), 1.0, "rows", "own")


@dataclass(frozen=True, slots=True)
class Trained:
    """Memory and collectives of one step, and of publishing the version that it made."""

    phases: list[Phase]
    held_bytes: int
    """Bytes held between two steps: parameters, moments, gradients."""
    flops_per_pass: float
    """Floating-point operations of this rank in a pass, none of them recomputed."""
    publication: Phase

    @property
    def peak(self) -> Phase:
        """Phase in which the most bytes are held."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)


def train_one_step(config: PreTrainedConfig, table: LearnerTable, batch: Microbatch, num_passes: int) -> Trained:
    """Train one step of `num_passes` passes on every rank; each pass of a rank holds such a batch."""
    watched = Watched()
    with fake_group(table.processes), watched.resizing(), _numpy_of_shapes(), _pieces_of_a_gpu():
        model = skeleton(config, config.num_hidden_layers, torch.float32)
        with (fake := FakeTensorMode(allow_non_fake_inputs=True)):
            without_data(model)
        order = StepOrder(_rows(batch, table.processes * num_passes), {OWN.name: 1.0})
        board: Any = watched  # in place of a board: nobody looks for ranks that stand still
        world = World(0, table.processes, torch.device("cpu"), board)
        # Outside of FakeTensorMode, which the model's tensors carry: device meshes are tensors with values.
        with watched:
            trainer = Trainer(model, table, [OWN], temperature=1.0, seed=0, total_steps=1, world=world)
        watched.note(BETWEEN)
        with fake, watched:
            _update_once(trainer)
            gc.collect()
            watched.take_phases()
            trainer.train(order, step=0)
            phases = watched.take_phases()
            assert [phase.name for phase in phases].count("backward") == num_passes, "a pass holds other rows"
            watched.note("publishing")
            for source in weight_sources(trainer.model):
                source.whole()
            (publication,) = watched.take_phases()
        flops = training_flops(trainer.model, order.examples, batch.places * num_passes * table.processes)
        held_bytes = sum(map(_held_bytes, [*trainer.held(), *_gradients(trainer)]))
    return Trained(phases, held_bytes, flops / table.processes / num_passes, publication)


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of `size` ranks, and leave any group that it was in before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _numpy_of_shapes() -> Iterator[None]:
    """Let `Tensor.numpy` return zeros: metrics become arrays, and tensors without data have no values."""
    with patch.object(Tensor, "numpy", lambda tensor, **_: np.zeros(tuple(tensor.shape), np.float32)):
        yield


@contextmanager
def _pieces_of_a_gpu() -> Iterator[None]:
    """Let an update on the CPU take as many elements at once as on a GPU."""
    with patch.object(piecewise_adamw, "CPU_PIECE_ELEMENTS", piecewise_adamw.PIECE_ELEMENTS):
        yield


def _update_once(trainer: Trainer) -> None:
    """Update once before anything is counted, since moments exist from the first update on.

    DTensor also works out once for each operation how to shard its result, by means of whole tensors without data,
    which would be counted as memory.
    """
    # Under FSDP2 a DTensor gradient in float32 claims the number format of its parameter.
    as_told = [torch.zeros_like(parameter) for parameter in trainer.model.parameters()]
    torch._foreach_mul_(as_told, torch.nn.utils.get_total_norm(as_told))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    norm: Any = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    norm.full_tensor()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)


def _rows(batch: Microbatch, num_passes: int) -> list[TrainingExample]:
    """Training examples of all ranks, in groups that share a prompt."""
    answer = batch.answer_tokens
    ones, ids = np.ones(answer, np.float32), np.ones(answer, np.int32)
    return [
        TrainingExample(
            prompt_token_ids=np.full(batch.prompt_tokens, row // batch.rows_per_prompt, np.int32),
            answer_token_ids=ids,
            component=OWN.name,
            advantages=ones,
            weights=ones,
            behaviour_logprobs=-ones,
            prompt_id=str(row // batch.rows_per_prompt),
            source="me",
        )
        for row in range(num_passes * batch.rows)
    ]


def _gradients(trainer: Trainer) -> list[Tensor]:
    return [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]


def _held_bytes(tensor: Any) -> int:
    local = getattr(tensor, "to_local", lambda: tensor)()
    return int(local.nbytes)
