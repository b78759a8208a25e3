"""Inputs of checkpointed blocks that wait elsewhere: the same bits, and nothing of them left where they were."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.learner import sharding
from mrl.learner.activation_offload import PIECE_BYTES, OffloadedInputs, locked_bytes
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.architectures import init_model
from mrl.objectives.specs import Clipped
from mrl.sharing.regime import Component

OWN = Component("own", Clipped(), 1.0, "rows", "own")
RESCUE = Component("rescue", Clipped(), 1.0, "rows", "peer")
NUM_BLOCKS = 3


class Counted(OffloadedInputs):
    """Counts what leaves and what comes back."""

    made: "list[Counted]" = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.left: list[tuple[int, ...]] = []
        self.came_back = 0
        self.made.append(self)

    def _leave(self, tensor: Tensor) -> Any:
        self.left.append(tuple(tensor.shape))
        return super()._leave(tensor)

    def _come_back(self, waiting: Any) -> Tensor:
        self.came_back += 1
        return super()._come_back(waiting)


def trained(family: str, rows: list[Any], **keys: Any) -> list[Tensor]:
    """Parameters after two steps of several passes."""
    recipe = MakeTable(architecture=family, tokenizer="byte_level", hidden_size=32, num_layers=NUM_BLOCKS, num_heads=4)
    torch.manual_seed(0)
    model = init_model(recipe, vocab_size=64, eos_id=0, pad_id=0)
    table = LearnerTable.model_validate({"microbatch_tokens": 96, "activation_checkpointing": True, **keys})
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(model, table, [OWN, RESCUE], temperature=1.0, seed=0, total_steps=2, world=world)
    for step in range(2):
        trainer.train(StepOrder(rows, {"own": 8.0, "rescue": 8.0}), step)
    return [parameter.detach() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
@pytest.mark.parametrize("keys", [{}, {"precision": "bfloat16"}, {"lora": {"rank": 4}}])
def test_the_bits_are_those_of_inputs_that_stay(
    make_rows: Any, monkeypatch: pytest.MonkeyPatch, family: str, keys: dict[str, Any]
) -> None:
    """Of every family one input for each block and pass leaves, and comes back; no other tensor does."""
    rows = [row for row in make_rows(8) if row.component == "own"]
    wanted = trained(family, rows, **keys)
    monkeypatch.setattr(sharding, "OffloadedInputs", Counted)
    monkeypatch.setattr(Counted, "made", [])
    found = trained(family, rows, **keys, activation_offload=True)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    (counted,) = Counted.made
    passes, rest = divmod(len(counted.left), NUM_BLOCKS)
    assert passes >= 2
    assert rest == 0
    assert counted.came_back == len(counted.left)
    assert {(shape[0], shape[2]) for shape in counted.left} == {(1, 32)}, "hidden states"


@pytest.mark.parametrize(
    ("size", "pieces", "rest"), [(0, 0, 0), (1, 0, 1), (3, 0, 4), (PIECE_BYTES, 1, 0), (5 * PIECE_BYTES + 9, 5, 16)]
)
def test_locked_memory_is_whole_pieces_and_a_power_of_two(size: int, pieces: int, rest: int) -> None:
    """As torch's allocator of locked memory rounds them."""
    assert locked_bytes(size) == pieces * PIECE_BYTES + rest
