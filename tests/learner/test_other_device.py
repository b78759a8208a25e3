"""A learner whose device is not the host: no operation of a step mixes tensors of the two.

Tensors have no data (FakeTensorMode) and lie on the meta device, which stands for a GPU: torch then refuses whatever it
would refuse there. Where a value is asked for, it is told one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks.rank import fake_group
from fake_ranks.told import Told
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import optimizer

from mrl.config.policy_tables import LearnerTable
from mrl.learner import sharding
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.token_diagnostics import TokenDiagnostics
from mrl.learner.trainer import Trainer, check_forward
from mrl.models.parameters import whole_weights
from mrl.objectives.specs import Cispo, Clipped, Correction, CrossSequence, Dppo, Grafted, Imitation, Regularizer, Trrd
from mrl.sharing.regime import Component

STAND_IN = torch.device("meta")
GRPO = Clipped(0.2, 0.2, correction=Correction("token", "truncate", 0.0, 5.0))
PEERS = (
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
    Component("shared", CrossSequence(lower=0.01, lower_step=0.0, alpha=1.0), 0.7, "rows", "peer"),
    Component("pooled", Clipped(base="behaviour", dual_clip=3.0), 0.5, "rows", "peer"),
)
OWN_TERMS = {
    "grpo": GRPO,
    "gspo": Clipped(0.3, 0.3, ratio="sequence", correction=Correction("sequence", "truncate", 0.0, 5.0)),
    "cispo": Cispo(correction=Correction()),
    "dppo": Dppo(),
    "grafted": Grafted(Clipped(ratio="sequence"), floor=0.1),
    "trrd": Trrd(correction=Correction()),
}
LAYOUTS = {
    "two updates": {"minibatches": 2},
    "checkpointing, moments on the host": {"activation_checkpointing": True, "optimizer_memory": "host"},
    "inputs of blocks and small moments on the host": {
        "activation_checkpointing": True,
        "activation_offload": True,
        "optimizer_memory": "host",
        "optimizer_dtype": "bfloat16",
    },
    "small moments": {"optimizer_dtype": "bfloat16"},
    "adapters": {"lora": {"rank": 4}},
}


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without data; a fused optimizer that knows the stand-in; arrays of what has come back to the host."""
    kernels = [*optimizer._get_fused_kernels_supported_devices(), STAND_IN.type]
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: kernels)
    monkeypatch.setattr(Tensor, "numpy", as_array)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def as_array(tensor: Tensor) -> Any:
    assert tensor.device.type == "cpu", "only what lies on the host becomes an array"
    return np.zeros(tuple(tensor.shape), np.float32)


def moved(model: nn.Module, device: torch.device, **_: Any) -> nn.Module:
    """In place of `nn.Module.to`, which swaps tensors that without data cannot be; tied ones stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in made:
                    there = tensor.detach().to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
                if tensor is not None:
                    held[name] = made[tensor]
    return model


def trainer_on(model: nn.Module, keys: dict[str, Any], components: tuple[Component, ...], reference: Any) -> Trainer:
    table = LearnerTable.model_validate({"microbatch_tokens": 96} | keys)
    how = {"temperature": 0.8, "seed": 0, "total_steps": 10, "world": World(0, 1, STAND_IN)}
    return Trainer(model, table, components, **how, reference=None if table.lora else reference)


def train(tiny_model, make_rows, monkeypatch, *, keys: dict[str, Any], own: Component) -> dict[str, float]:
    monkeypatch.setattr(nn.Module, "to", moved)
    components = (own, *PEERS)
    trainer = trainer_on(tiny_model(), keys, components, tiny_model(seed=1))
    monkeypatch.setattr("mrl.learner.trainer._in_order", lambda row_T: range(4))  # of two texts
    monkeypatch.setattr("mrl.learner.trainer.excess", lambda *_: "")
    with Told():
        check_forward(trainer.model, [[1, 2, 3, 4], [5, 6, 7, 8]])
        order = StepOrder(make_rows(24, shared=True), {component.name: 8.0 for component in components})
        losses = trainer.train(order, step=0)
        assert {tensor.device for _, tensor in whole_weights(trainer.model)} == {STAND_IN}
    assert {one.device for one in trainer.model.parameters()} == {STAND_IN}
    return losses


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_keeps_a_step_on_its_device(tiny_model, make_rows, monkeypatch, layout):
    """With rows of peers, teachers, a reference and an entropy bonus."""
    own = Component("own", GRPO, 1.0, "rows", "own", Regularizer(0.05, "k3", 0.02))

    losses = train(tiny_model, make_rows, monkeypatch, keys=LAYOUTS[layout], own=own)

    assert {"loss/own", "loss/pooled", "kl/reference_nats", "entropy/policy_nats"} <= losses.keys()


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("term", OWN_TERMS)
def test_every_term_keeps_a_step_on_its_device(tiny_model, make_rows, monkeypatch, term):
    """What it computes of own rows."""
    assert train(tiny_model, make_rows, monkeypatch, keys={}, own=Component("own", OWN_TERMS[term], 1.0, "rows", "own"))


@pytest.fixture
def lone_shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FSDP2 on a rank of its own that takes the stand-in for a device which computes."""

    def mesh(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return make_mesh(*arguments)

    fully_shard, make_mesh = "torch.distributed.fsdp._fully_shard", sharding._mesh
    monkeypatch.setattr(sharding, "_mesh", mesh)
    monkeypatch.setattr(torch, "meta", torch.cpu, raising=False)  # its streams
    monkeypatch.setattr(f"{fully_shard}._fully_shard._get_device_from_mesh", lambda _: STAND_IN)
    monkeypatch.setattr(f"{fully_shard}._fsdp_param_group.FSDPParamGroup._validate_no_meta_params", lambda _: None)
    with fake_group(1):
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data", "lone_shard")
@pytest.mark.parametrize("keys", [{}, {"parameter_dtype": "bfloat16", "optimizer_memory": "host"}])
def test_bfloat16_keeps_a_step_on_its_device(tiny_model, make_rows, monkeypatch, keys):
    """Parameters that FSDP2 gathers and casts, or gathers as they are."""
    own = Component("own", GRPO, 1.0, "rows", "own", Regularizer(0.05, "k3", 0.02))

    def there(**how: Any) -> nn.Module:
        return moved(tiny_model(**how), STAND_IN)

    assert train(there, make_rows, monkeypatch, keys={"precision": "bfloat16"} | keys, own=own)


@pytest.mark.usefixtures("no_data")
def test_a_tensor_that_was_left_on_the_host_is_found(tiny_model, make_rows, monkeypatch):
    """Counts of a step begin on the host: torch refuses to add to them what lies on the device."""

    def forgetful(self: TokenDiagnostics, *arguments: Any) -> None:
        begin(self, *arguments)
        self._largest = torch.zeros(1)

    begin = TokenDiagnostics.__init__
    monkeypatch.setattr(TokenDiagnostics, "__init__", forgetful)

    with pytest.raises(RuntimeError, match="device"):
        train(tiny_model, make_rows, monkeypatch, keys={}, own=Component("own", GRPO, 1.0, "rows", "own"))
