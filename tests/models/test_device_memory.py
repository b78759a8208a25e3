"""Memory and devices that are not there, told in one line."""

import numpy as np
import pytest
import torch

from mrl.errors import DeviceError
from mrl.models.device_memory import OffDevice, check_device, enough_memory

TOO_MANY_BYTES = 1 << 50


def cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def host() -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    "work",
    [lambda: torch.empty(TOO_MANY_BYTES), lambda: np.zeros(TOO_MANY_BYTES), cublas, cuda, host],
    ids=["torch", "numpy", "cublas", "cuda", "host"],
)
def test_memory_that_runs_out_is_one_line_with_its_cure(work):
    """Whoever says so: torch and numpy by their own allocators here, a GPU and the kernel by their words."""
    told = r"^a/model: out of memory while loading; got .+; cure: less$"
    with (
        pytest.raises(DeviceError, match=told) as caught,
        enough_memory("while loading", where="a/model", cure="less"),
    ):
        work()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 cannot be multiplied"), OSError(2, "No such file")])
def test_other_faults_are_told_as_they_are(error):
    """No other error becomes one of memory."""
    with pytest.raises(type(error)) as caught, enough_memory("while loading", where="", cure=""):
        raise error
    assert caught.value is error


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    """Whether torch lacks CUDA or the machine lacks the GPU; a CPU is always there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_device("cpu")
    for is_built, told in ((False, "built without CUDA"), (True, "sees no GPU")):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda is_built=is_built: is_built)
        with pytest.raises(DeviceError, match=rf"{told}; got 'cuda:0'"):
            check_device("cuda:0")


def test_tensors_come_back_bit_for_bit_and_stay_the_same_tensors():
    """Views share memory, which goes once; a parameter and its optimizer's state go on as they were."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = [layer.weight, layer.weight.data[3:5], layer.bias, *optimizer.state[layer.weight].values()]
    held.append(torch.tensor([float("nan"), float("inf"), -0.0]))
    before = [tensor.detach().clone() for tensor in held]
    away = OffDevice()

    away.leave(held)
    assert {tensor.untyped_storage().nbytes() for tensor in held} == {0}
    away.come_back()

    assert [tensor.numpy(force=True).tobytes() for tensor in held] == [one.numpy().tobytes() for one in before]
    layer(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(held[0], before[0])
    assert torch.equal(held[1], held[0][3:5])


def test_tensors_leave_again_and_again():
    weights = torch.arange(5.0)
    away = OffDevice()
    for round_number in range(3):
        away.leave([weights])
        away.come_back()
        weights += 1.0
        assert weights.tolist() == [value + round_number + 1 for value in range(5)]


def test_memory_that_others_own_stays():
    """As that of numpy's arrays, which nobody can free."""
    lent = torch.from_numpy(np.arange(3))
    away = OffDevice()

    away.leave([lent])
    assert lent.tolist() == [0, 1, 2]
    away.come_back()
