"""AdamW with its moments in main memory, or in 16 bits.

From main memory the same parameters bit for bit, and little on the device at once.

There may be no GPU here: tensors without data stand for one, and an operation between two devices fails as it would.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks.rank import fake_group
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.learner.piecewise_adamw import PiecewiseAdamW
from mrl.learner.stochastic_rounding import rounding_bits, rounding_key, to_bfloat16
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
    host = PiecewiseAdamW(own, **SETTINGS, on_host=True, piece_elements=piece_elements)
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
    optimizer = PiecewiseAdamW([parameter], **SETTINGS, on_host=True, piece_elements=1 << 16)
    parameter.grad = torch.empty_like(parameter)
    with BytesOnGpu() as copies:
        optimizer.step()
    assert copies.peak == 2 * 4 * 65536 + 4
    assert {tensor.device.type for tensor in optimizer.state[parameter].values()} == {"cpu"}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks with a GPU each, of which this process is the first; they never speak."""
    with fake_group(2):
        yield DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)


@pytest.mark.usefixtures("mesh", "fake_gpu")
def test_shards_of_a_gpu_have_their_moments_on_the_host(mesh: DeviceMesh) -> None:
    """Before the first update and after it; a checkpoint sees them as shards of the whole."""
    shard = DTensor.from_local(torch.empty(5, 4, device="cuda"), mesh, [Shard(0)], run_check=False)
    optimizer = PiecewiseAdamW([shard], **SETTINGS, on_host=True)
    shard.grad = torch.empty_like(shard)
    before = optimizer.state[shard]["exp_avg"]
    optimizer.step()
    for moment in (before, optimizer.state[shard]["exp_avg"]):
        assert isinstance(moment, DTensor)
        assert (moment.shape, moment.placements) == ((10, 4), (Shard(0),))
        assert moment.to_local().device.type == "cpu"
    assert shard.to_local().device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_read_into_the_moments_that_are_there(tmp_path: Path, dtype: torch.dtype) -> None:
    """So none of them passes through the device, where they may have no room; the next updates give the same bits."""
    model, resumed = nn.Linear(6, 5), nn.Linear(6, 5)
    optimizers = [PiecewiseAdamW(one.parameters(), **SETTINGS, on_host=True, dtype=dtype) for one in (model, resumed)]
    first, second = optimizers
    train(model, first, 2)
    save(tmp_path, model, first)
    places = {id(tensor) for state in second.state.values() for tensor in state.values()}

    restore_training(resumed, second, CheckpointStore(tmp_path, "a").open(2))

    assert {id(tensor) for state in second.state.values() for tensor in state.values()} == places
    train(model, first, 3)
    train(resumed, second, 3)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), resumed.parameters(), strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for step in range(2):
        give_gradients(list(model.parameters()), seed + 10 * step + 1)
        optimizer.step()


def rounded_adamw(parameters: list[nn.Parameter], moments: list[list[Tensor]], step: int) -> None:
    """AdamW (arXiv 1711.05101, algorithm 2) in float64, whose moments are bfloat16 before it and after it."""
    lr, (beta1, beta2), decay = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["weight_decay"]
    for number, (parameter, held) in enumerate(zip(parameters, moments, strict=True)):
        gradient = parameter.grad.double()
        mean = beta1 * held[0].double() + (1 - beta1) * gradient
        square = beta2 * held[1].double() + (1 - beta2) * gradient**2
        size = (square / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
        moved = parameter.double() * (1 - lr * decay) - lr * mean / (1 - beta1 ** (step + 1)) / size
        parameter.data.copy_(moved)
        bits = rounding_bits(parameter.numel(), first=0, key=rounding_key(number, step), device=torch.device("cpu"))
        for index, moment in enumerate((mean, square)):
            held[index].copy_(to_bfloat16(moment.float().view(-1), bits >> 16 * index).view(parameter.shape))


def test_moments_of_16_bits_are_rounded_after_each_update() -> None:
    """As a plain AdamW whose moments are rounded: the parameters to 1e-5, the moments to a unit here and there."""
    own, given = parameters()[:4], parameters()[:4]
    small = PiecewiseAdamW(own, **SETTINGS, on_host=False, dtype=torch.bfloat16, piece_elements=1024)
    moments = [[torch.zeros_like(one, dtype=torch.bfloat16) for _ in range(2)] for one in given]
    for step in range(6):
        for trained in (own, given):
            give_gradients(trained, 2 * step + 1)
        small.step()
        rounded_adamw(given, moments, step)
    for one, other, held in zip(own, given, moments, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for key, wanted in zip(("exp_avg", "exp_avg_sq"), held, strict=True):
            found = small.state[one][key]
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-6)
            assert (found == wanted).float().mean() > 0.99


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("piece_elements", [16, 1 << 24])
def test_small_moments_are_the_same_wherever_they_lie_and_however_they_are_cut(
    on_host: bool, piece_elements: int
) -> None:
    """Bit for bit: what is random belongs to the element."""
    own, given = parameters(), parameters()
    first = PiecewiseAdamW(own, **SETTINGS, on_host=on_host, dtype=torch.bfloat16, piece_elements=piece_elements)
    second = PiecewiseAdamW(given, **SETTINGS, on_host=False, dtype=torch.bfloat16)
    for step in range(4):
        for optimizer, trained in ((first, own), (second, given)):
            give_gradients(trained, step)
            optimizer.step()
    for one, other in zip(own, given, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(first.state[one][key], value) for key, value in second.state[other].items())


def stepped(parameter: Tensor, gradients: list[Tensor]) -> PiecewiseAdamW:
    """After some updates of one parameter with small moments."""
    optimizer = PiecewiseAdamW([parameter], **SETTINGS, on_host=False, dtype=torch.bfloat16)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return optimizer


def test_shards_round_as_the_whole_does() -> None:
    """Five rows on two ranks, three and two of them."""
    generator = torch.Generator().manual_seed(0)
    whole, *gradients = (torch.randn(5, 64, generator=generator) for _ in range(4))
    wanted = nn.Parameter(whole.clone())
    state = stepped(wanted, gradients).state[wanted]
    for rank, held in enumerate((slice(0, 3), slice(3, 5))):
        with fake_group(2, rank):
            mesh = init_device_mesh("cpu", (2,))

            def shard(tensor: Tensor, held: slice = held, mesh: DeviceMesh = mesh) -> DTensor:
                how = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
                return DTensor.from_local(tensor[held].clone(), mesh, [Shard(0)], **how)

            parameter = shard(whole)
            found = stepped(parameter, [shard(gradient) for gradient in gradients]).state[parameter]
            assert torch.equal(parameter.to_local(), wanted[held])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[key].to_local(), state[key][held])


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_resume_may_change_the_format(tmp_path: Path, before: torch.dtype, after: torch.dtype) -> None:
    """Moments are converted: to the nearest, or exactly."""
    model, resumed = nn.Linear(60, 50), nn.Linear(60, 50)
    first = PiecewiseAdamW(model.parameters(), **SETTINGS, on_host=False, dtype=before)
    second = PiecewiseAdamW(resumed.parameters(), **SETTINGS, on_host=False, dtype=after)
    train(model, first, 2)
    save(tmp_path, model, first)

    restore_training(resumed, second, CheckpointStore(tmp_path, "a").open(2))

    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        for key, moment in first.state[one].items():
            kept = second.state[other][key]
            assert torch.equal(kept, moment if key == "step" else moment.to(after))
            assert kept.dtype == (torch.float32 if key == "step" else after)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a learner of one rank does, at step 2."""
    pieces = {name: held_piece(tensor, 0) for name, tensor in training_tensors(model, optimizer).items()}
    store = CheckpointStore(folder, "a")
    store.write_pieces(2, pieces, rank=0, life=0)
    store.complete(2, b"{}", life=0)
