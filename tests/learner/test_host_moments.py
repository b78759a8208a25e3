"""AdamW with its moments in main memory: the same parameters bit for bit, and little on the device at once.

There may be no GPU here: tensors without data stand for one, and an operation between two devices fails as it would.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.learner.host_moments import HostMomentsAdamW
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import held_piece
from mrl.weights.training_state import restore_training, training_tensors

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = ((7, 33), (100, 51), (5,), (), (0, 4))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Random ones; the first parameter has one in every second step."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient if index or step % 2 else None


@pytest.mark.parametrize("piece_elements", [16, 1024, 1 << 24])
def test_the_parameters_are_those_of_torchs_own_adamw(piece_elements: int) -> None:
    """Bit for bit, however they are cut; so are the moments and the counts of steps, under torch's names."""
    own, given = parameters(), parameters()
    host = HostMomentsAdamW(own, **SETTINGS, piece_elements=piece_elements)
    device = AdamW(given, **SETTINGS, fused=True)
    for step in range(6):
        for optimizer, trained in ((host, own), (device, given)):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            give_gradients(trained, step)
            optimizer.step()
    for one, other in zip(own, given, strict=True):
        assert torch.equal(one, other)
        assert host.state[one].keys() == device.state[other].keys()
        assert all(torch.equal(host.state[one][key], value) for key, value in device.state[other].items())


class BytesOnGpu(TorchDispatchMode):
    """Counts the bytes of copies to a GPU that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._held: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it copied."""
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.device.type == "cuda":
            self._held.add(made)
            self.peak = max(self.peak, sum(tensor.nbytes for tensor in self._held))
        return made


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors have no data, and may say that they are on a GPU, of which this process knows nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._C._ensureCUDADeviceGuardSet()
    with FakeTensorMode(), torch.no_grad():
        yield


@pytest.mark.usefixtures("fake_gpu")
def test_one_piece_is_on_the_gpu_at_a_time() -> None:
    """Two moments of 65,536 elements, of a parameter that has 16 times as many, and a count of steps.

    Where copies cannot run beside arithmetic; `tests/gpu` has the other way.
    """
    parameter = torch.empty(1024, 1024, device="cuda")
    optimizer = HostMomentsAdamW([parameter], **SETTINGS, piece_elements=1 << 16)
    parameter.grad = torch.empty_like(parameter)
    with BytesOnGpu() as copies:
        optimizer.step()
    assert copies.peak == 2 * 4 * 65536 + 4
    assert {tensor.device.type for tensor in optimizer.state[parameter].values()} == {"cpu"}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks with a GPU each, of which this process is the first; they never speak."""
    if dist.is_initialized():  # by another test of this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
    dist.destroy_process_group()


@pytest.mark.usefixtures("mesh", "fake_gpu")
def test_shards_of_a_gpu_have_their_moments_on_the_host(mesh: DeviceMesh) -> None:
    """Before the first update and after it; a checkpoint sees them as shards of the whole."""
    shard = DTensor.from_local(torch.empty(5, 4, device="cuda"), mesh, [Shard(0)], run_check=False)
    optimizer = HostMomentsAdamW([shard], **SETTINGS)
    shard.grad = torch.empty_like(shard)
    before = optimizer.state[shard]["exp_avg"]
    optimizer.step()
    for moment in (before, optimizer.state[shard]["exp_avg"]):
        assert isinstance(moment, DTensor)
        assert (moment.shape, moment.placements) == ((10, 4), (Shard(0),))
        assert moment.to_local().device.type == "cpu"
    assert shard.to_local().device.type == "cuda"


def test_a_checkpoint_is_read_into_the_moments_that_are_there(tmp_path: Path) -> None:
    """So none of them passes through the device, where they may have no room; the next updates give the same bits."""
    model, resumed = nn.Linear(6, 5), nn.Linear(6, 5)
    first, second = (HostMomentsAdamW(one.parameters(), **SETTINGS) for one in (model, resumed))
    train(model, first, 2)
    store = CheckpointStore(tmp_path, "a")
    pieces = {name: held_piece(tensor, 0) for name, tensor in training_tensors(model, first).items()}
    store.write_pieces(2, pieces, rank=0, life=0)
    store.complete(2, b"{}", life=0)
    places = {id(tensor) for state in second.state.values() for tensor in state.values()}

    restore_training(resumed, second, store.open(2))

    assert {id(tensor) for state in second.state.values() for tensor in state.values()} == places
    train(model, first, 3)
    train(resumed, second, 3)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), resumed.parameters(), strict=True))


def train(model: nn.Module, optimizer: HostMomentsAdamW, seed: int) -> None:
    for step in range(2):
        give_gradients(list(model.parameters()), seed + 10 * step + 1)
        optimizer.step()
