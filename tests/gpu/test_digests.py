"""Tensors on a GPU have the digests of the same bytes on a CPU, also while the GPU computes."""

import pytest
import torch

from mrl.models import tensor_file
from mrl.models.tensor_file import digests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_digests_of_a_gpu_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks and formats, larger than the room they come through, and written just before they are asked for."""
    monkeypatch.setattr(tensor_file, "FROM_GPU_BYTES", 1000)
    there = {
        "matrix": torch.randn(301, 207, device="cuda"),
        "turned": torch.randn(64, 33, device="cuda").bfloat16().T,
        "number": torch.tensor(3, device="cuda"),
        "flags": torch.rand(77, device="cuda") > 0.5,
        "none": torch.empty(0, 4, device="cuda"),
    }
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 100
    there["matrix"].add_(1.0)
    found = digests(there)
    assert found == digests({name: tensor.cpu() for name, tensor in there.items()})
