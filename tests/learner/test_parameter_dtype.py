"""Parameters kept in bfloat16: what stays in float32, what is computed with them, and what engines get."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.errors import ModelFolderError
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.architectures import init_model
from mrl.models.lora import is_adapter
from mrl.models.parameters import named_weights, weight_sources, whole_weights
from mrl.models.tensor_file import digest, read_folder
from mrl.objectives.regularizer import Regularizer
from mrl.objectives.specs import Clipped
from mrl.records.version import Version
from mrl.sharing.regime import Component
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.publish import Publisher

SMALL = {"parameter_dtype": "bfloat16"}
HELD = Component("own", Clipped(0.2, 0.2), 1.0, "rows", "own", Regularizer(0.1, "k3", 0.0))
VOCAB = 64


def make_model(*, rounds: bool = False, architecture: str = "qwen3") -> nn.Module:
    """In float32; with `rounds`, its numbers are those of bfloat16."""
    recipe = MakeTable(architecture=architecture, tokenizer="byte_level", hidden_size=32, num_layers=2, num_heads=4)
    model = init_model(recipe, vocab_size=VOCAB, eos_id=0, pad_id=0)
    for parameter in model.parameters() if rounds else ():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def make_trainer(model: nn.Module, keys: dict[str, Any], reference: nn.Module | None = None) -> Trainer:
    table = LearnerTable.model_validate({"lr": 1e-2} | keys)
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "total_steps": 4, "world": alone(), "reference": reference}
    return Trainer(model, table, (HELD,), **how)


def steps(trainer: Trainer, make_rows, count: int = 2) -> list[dict[str, float]]:
    orders = [[row for row in make_rows(16, seed=step) if row.component == "own"] for step in range(count)]
    return [trainer.train(StepOrder(rows, {"own": 12.0}), step) for step, rows in enumerate(orders)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "qwen3_moe"])
def test_parameters_are_rounded_to_the_nearest_and_buffers_stay(architecture: str) -> None:
    """Norms and experts too; tied ones stay tied, and count once."""
    before = {
        name: tensor.detach().clone() for name, tensor in named_weights(make_model(architecture=architecture)).items()
    }
    model = place(make_model(architecture=architecture), LearnerTable.model_validate(SMALL), alone())
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}
    weights = named_weights(model)
    assert weights.keys() == before.keys()
    assert all(torch.equal(whole(tensor), before[name].bfloat16()) for name, tensor in weights.items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_of_many_passes_are_summed_in_float32(precision: str) -> None:
    """Bit for bit what the passes give one by one, added up; sums in bfloat16 are others."""
    table = LearnerTable.model_validate(SMALL | {"precision": precision})
    model = place(make_model(), table, alone())
    ids = torch.randint(0, VOCAB, (6, 9), generator=torch.Generator().manual_seed(0))

    def gradients(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        for row in rows:
            model(input_ids=row.unsqueeze(0)).logits.float().logsumexp(-1).sum().backward()
        return {name: whole(one.grad).clone() for name, one in model.named_parameters()}

    together, each = gradients(ids), [gradients(row) for row in ids.split(1)]
    for name, found in together.items():
        assert found.dtype == torch.float32
        assert torch.equal(found, _added(each, name))
    rounded = {name: _added([{name: one[name].bfloat16()} for one in each], name) for name in together}
    assert any(not torch.equal(rounded[name].float(), found) for name, found in together.items())


def _added(each: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """One after the other, in their own format."""
    total = each[0][name].clone()
    for one in each[1:]:
        total += one[name]
    return total


def test_a_reference_is_what_the_policy_was_at_the_start(make_rows) -> None:
    """In the same format: nothing lies between them before the first update."""
    trainer = make_trainer(make_model(), SMALL, make_model())
    first, second = steps(trainer, make_rows)
    assert first["kl/reference_nats"] == 0.0
    assert second["kl/reference_nats"] > 0.0
    assert {one.dtype for model in (trainer.model, trainer._reference) for one in model.parameters()} == {
        torch.bfloat16
    }
    assert {one.grad.dtype for one in trainer.model.parameters()} == {torch.float32}


def test_adapters_train_as_on_float32(make_rows) -> None:
    """On weights that bfloat16 has, bit for bit, merged weights included; adapters and their moments are float32."""
    lora = {"lora": {"rank": 4, "alpha": 8}}
    small, given = make_trainer(make_model(rounds=True), SMALL | lora), make_trainer(make_model(rounds=True), lora)
    assert steps(small, make_rows) == steps(given, make_rows)
    for name, tensor in named_weights(small.model).items():
        assert tensor.dtype == (torch.float32 if is_adapter(name) or tensor.ndim == 0 else torch.bfloat16), name
    weights = dict(whole_weights(given.model))
    assert all(torch.equal(tensor.float(), weights[name]) for name, tensor in whole_weights(small.model))


def test_weights_below_adapters_are_never_cut_off() -> None:
    """Rows of float32 would be rounded once and for all: one line says what to do."""
    with pytest.raises(
        ModelFolderError, match=r"parameter_dtype: .* adapters.*; got .*; wanted .*bfloat16.*; cure: .*float32"
    ):
        make_trainer(make_model(), SMALL | {"lora": {"rank": 4}})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engines_get_the_very_numbers(tmp_path: Path, make_rows, dtype: str) -> None:
    """In either format: engines in bfloat16 without any rounding, by the digests of the parameters themselves."""
    trainer = make_trainer(make_model(), SMALL, make_model())
    steps(trainer, make_rows)
    publisher = Publisher(tmp_path, "a", dtype=dtype)
    canary = make_canary(trainer.model, canary_sequences(VOCAB))
    publisher.begin(weight_sources(trainer.model), Version(0, 1), canary)
    publisher.finish()
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, its: torch.dtype, shape: list[int]) -> torch.Tensor:
        return found.setdefault(name, torch.empty(shape, dtype=its))

    digests = dict(read_folder(publisher.folder / str(Version(0, 1)), keep))
    publisher.close()
    for name, tensor in named_weights(trainer.model).items():
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name].float(), whole(tensor).float())
        assert dtype == "float32" or digests[name] == digest(whole(tensor))
