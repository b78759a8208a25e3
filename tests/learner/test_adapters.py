"""A learner of adapters: the weights below them stay, ranks and shards train the same, and the reference is free."""

import itertools
from pathlib import Path

import check_layouts
import pytest
import torch

from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.architectures import init_model
from mrl.models.lora import adapters_off, is_adapter
from mrl.models.parameters import named_weights, whole_weights
from mrl.objectives.regularizer import Regularizer
from mrl.objectives.specs import Clipped
from mrl.sharing.regime import Component
from mrl.weights.training_state import training_tensors

ROOT = Path(__file__).parents[2]
LORA = {"lora": {"rank": 4, "alpha": 8}}
HELD = Component("own", Clipped(0.2, 0.2), 1.0, "rows", "own", Regularizer(0.1, "k3", 0.0))


def make_model() -> torch.nn.Module:
    recipe = MakeTable(architecture="qwen3", tokenizer="byte_level", hidden_size=32, num_layers=2, num_heads=4)
    return init_model(recipe, vocab_size=64, eos_id=0, pad_id=0)


def make_trainer(reference: torch.nn.Module | None = None) -> Trainer:
    table = LearnerTable.model_validate({"lr": 1e-2, "minibatches": 2} | LORA)
    world = World(0, 1, torch.device("cpu"))
    arguments = {"temperature": 1.0, "seed": 3, "total_steps": 4, "world": world, "reference": reference}
    return Trainer(make_model(), table, (HELD,), **arguments)


def steps(trainer: Trainer, make_rows, count: int = 3) -> list[dict[str, float]]:
    orders = [[row for row in make_rows(16, seed=step) if row.component == "own"] for step in range(count)]
    return [trainer.train(StepOrder(rows, {"own": 12.0}), step) for step, rows in enumerate(orders)]


def test_training_moves_adapters_and_nothing_else(make_rows) -> None:
    """The optimizer and a checkpoint know of nothing else; without its adapters the model is what it was."""
    trainer, before = make_trainer(), named_weights(make_model())
    steps(trainer, make_rows)
    tensors = training_tensors(trainer.model, trainer.optimizer)
    assert all(is_adapter(name) for name in tensors)
    assert {name.split("/")[0] for name in tensors} == {"model", "optimizer"}
    second = [one.detach() for name, one in tensors.items() if name.startswith("model/") and ".lora_B." in name]
    assert max(float(one.abs().max()) for one in second) > 1e-3
    ids = torch.tensor([[1, 2, 3, 4]])
    with adapters_off(trainer.model):
        assert torch.equal(trainer.model(input_ids=ids).logits, make_model().eval()(input_ids=ids).logits)
    moved = {name for name, tensor in whole_weights(trainer.model) if not torch.equal(tensor, before[name])}
    assert len(moved) == 14, "of two blocks with seven linear layers each"


def test_the_reference_is_the_model_without_its_adapters(make_rows) -> None:
    """The same parameters and losses, bit for bit, as with a copy of the model at the start; and it does pull."""
    own, given = make_trainer(), make_trainer(make_model())
    losses, expected = steps(own, make_rows), steps(given, make_rows)
    assert losses == expected
    weights = dict(whole_weights(given.model))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole_weights(own.model))


@pytest.mark.system
def test_ranks_and_shards_train_the_same_adapters(tmp_path) -> None:
    """To 1e-5, exactly between ranks; a resume gives the same bits, and may be on other ranks."""
    alone = check_layouts.Layout(1, LORA)
    shards = check_layouts.Layout(2, LORA | {"sharding": "shard", "activation_checkpointing": True})
    wanted = [alone, check_layouts.Layout(2, LORA), shards]
    handed = [(alone, alone), (shards, shards), (shards, alone)]

    trained, resumed = check_layouts.train_all(wanted, handed, tmp_path)

    expected = trained[0][0]
    for layout, of_ranks in zip([*wanted, *handed], [*trained, *resumed], strict=True):
        assert check_layouts.difference(of_ranks[0], expected) <= 1e-5, layout
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks)), layout
    assert check_layouts.same_bits(resumed[0][0], expected)
    assert check_layouts.same_bits(resumed[1][0], trained[2][0])
    tensors = check_layouts.CheckpointStore(tmp_path / "saved-1", "policy").open(3).tensors
    assert all(is_adapter(name) for name in tensors)
