"""Memory and devices that are not there, told in one line."""

import numpy as np
import pytest
import torch

from mrl.errors import DeviceError
from mrl.models.device_memory import check_device, enough_memory

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
