"""AdamW with its moments in main memory, or in 16 bits, and parameters in 16 bits.

From main memory the same parameters bit for bit, and little on the device at once.

There may be no GPU here: tensors without data stand for one, and an operation between two devices fails as it would.
"""

import itertools
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
from mrl.models.parameters import trained_weights
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import held_piece
from mrl.weights.training_state import restore_training, training_tensors

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = ((7, 33), (100, 51), (5,), (), (0, 4))


BOTH = [torch.float32, torch.bfloat16]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Their gradients are float32 in any case."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad_dtype = torch.float32
    return made


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


def test_parameters_of_16_bits_are_rounded_after_each_update() -> None:
    """As a plain AdamW in float64 whose parameters are rounded: the same numbers, but for a unit here and there."""
    own, given = parameters(torch.bfloat16)[:4], parameters(torch.bfloat16)[:4]
    optimizer = PiecewiseAdamW(own, **SETTINGS, on_host=False, piece_elements=1024)
    moments = [[torch.zeros(one.shape, dtype=torch.float64) for _ in range(2)] for one in given]
    for step in range(6):
        for trained in (own, given):
            give_gradients(trained, 2 * step + 1)
        optimizer.step()
        for number, (parameter, held) in enumerate(zip(given, moments, strict=True)):
            moved = updated(parameter, held, step).float().view(-1)
            bits = rounding_bits(len(moved), first=0, key=rounding_key(number, step, 1), device=torch.device("cpu"))
            parameter.data.copy_(to_bfloat16(moved, bits).view(parameter.shape))
    for one, other in zip(own, given, strict=True):
        assert one.dtype == torch.bfloat16
        assert optimizer.state[one]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-6)
        assert (one == other).float().mean() > 0.99


def updated(parameter: Tensor, moments: list[Tensor], step: int) -> Tensor:
    """AdamW (arXiv 1711.05101, algorithm 2) in float64, whose moments are changed."""
    lr, (beta1, beta2), decay = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["weight_decay"]
    gradient = parameter.grad.double()
    mean = moments[0].mul_(beta1).add_(gradient, alpha=1 - beta1)
    square = moments[1].mul_(beta2).add_(gradient**2, alpha=1 - beta2)
    size = (square / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
    return parameter.detach().double() * (1 - lr * decay) - lr * mean / (1 - beta1 ** (step + 1)) / size


def test_updates_below_half_a_step_of_bfloat16_move_the_mean() -> None:
    """As far as they move float32: from 1 by a ten-thousandth each, where the next number is a 256th away.

    Rounded to the nearest, nothing moves at all.
    """
    small, exact = (nn.Parameter(torch.ones(4096, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    nearest, how = small.detach().clone(), {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.0, "on_host": False}
    optimizers = [PiecewiseAdamW([one], **how) for one in (small, exact)]
    for _ in range(200):
        for parameter, optimizer in zip((small, exact), optimizers, strict=True):
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.ones(4096)
            optimizer.step()
        nearest = (nearest.float() - 1e-4).bfloat16()
    assert float(exact.detach().mean()) == pytest.approx(0.98, abs=1e-5)
    assert float(small.detach().float().mean()) == pytest.approx(0.98, abs=7e-4), "five standard errors"
    assert torch.equal(nearest, torch.ones_like(nearest))


def test_gradients_in_16_bits_are_refused() -> None:
    """Sums in them would lose small ones: torch's kernel does not take them beside float32."""
    (parameter, *_) = parameters(torch.bfloat16)
    parameter.grad_dtype = torch.bfloat16
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        PiecewiseAdamW([parameter], **SETTINGS, on_host=False).step()


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


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("piece_elements", [16, 1 << 24])
def test_small_moments_are_the_same_wherever_they_lie_and_however_they_are_cut(
    on_host: bool, piece_elements: int, dtype: torch.dtype
) -> None:
    """And small parameters. Bit for bit: what is random belongs to the element."""
    own, given = parameters(dtype), parameters(dtype)
    first = PiecewiseAdamW(own, **SETTINGS, on_host=on_host, dtype=torch.bfloat16, piece_elements=piece_elements)
    second = PiecewiseAdamW(given, **SETTINGS, on_host=False, dtype=torch.bfloat16)
    for step in range(4):
        for optimizer, trained in ((first, own), (second, given)):
            give_gradients(trained, step)
            optimizer.step()
    for one, other in zip(own, given, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(first.state[one][key], value) for key, value in second.state[other].items())


def stepped(parameter: Tensor, gradients: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> PiecewiseAdamW:
    """After some updates of one parameter with moments of `dtype`."""
    optimizer = PiecewiseAdamW([parameter], **SETTINGS, on_host=False, dtype=dtype)
    parameter.grad_dtype = torch.float32
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("of", "dtype"), [*itertools.product(BOTH, BOTH)][1:])
def test_shards_round_as_the_whole_does(of: torch.dtype, dtype: torch.dtype) -> None:
    """Five rows on two ranks, three and two of them: moments of a format, and parameters of another."""
    generator = torch.Generator().manual_seed(0)
    whole, *gradients = (torch.randn(5, 64, generator=generator) for _ in range(4))
    whole = whole.to(of)
    wanted = nn.Parameter(whole.clone())
    state = stepped(wanted, gradients, dtype).state[wanted]
    for rank, held in enumerate((slice(0, 3), slice(3, 5))):
        with fake_group(2, rank):
            mesh = init_device_mesh("cpu", (2,))

            def shard(tensor: Tensor, held: slice = held, mesh: DeviceMesh = mesh) -> DTensor:
                how = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
                return DTensor.from_local(tensor[held].clone(), mesh, [Shard(0)], **how)

            parameter = shard(whole)
            found = stepped(parameter, [shard(gradient) for gradient in gradients], dtype).state[parameter]
            assert torch.equal(parameter.to_local(), wanted[held])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[key].to_local(), state[key][held])


@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_resume_may_change_the_format(tmp_path: Path, before: torch.dtype, after: torch.dtype, of_both: bool) -> None:
    """Moments are converted, and parameters: to the nearest, or exactly. The file has the format before."""
    model, resumed = nn.Linear(60, 50), nn.Linear(60, 50)
    if of_both:
        model, resumed = model.to(before), resumed.to(after)
    for parameter in (*model.parameters(), *resumed.parameters()):
        parameter.grad_dtype = torch.float32
    first = PiecewiseAdamW(model.parameters(), **SETTINGS, on_host=False, dtype=before)
    second = PiecewiseAdamW(resumed.parameters(), **SETTINGS, on_host=False, dtype=after)
    train(model, first, 2)
    save(tmp_path, model, first)

    restore_training(resumed, second, CheckpointStore(tmp_path, "a").open(2))

    saved = CheckpointStore(tmp_path, "a").open(2)
    for name, tensor in trained_weights(model).items():
        kept = trained_weights(resumed)[name]
        assert torch.equal(kept, tensor.to(kept.dtype))
        assert saved.read(f"model/{name}").dtype == (before if of_both else torch.float32)
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
