"""How weights come into vLLM's worker on a CPU, seen with a model that fuses two tensors; vLLM is not needed."""

import importlib
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.models.tensor_file import digest

INSIDE = Path(__file__).parents[2] / "mrl" / "engines" / "inside"
STUBS = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.utils")


class Fused(nn.Module):
    """Takes "q" and "k", and computes with both in one parameter; "norm" as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qk, self.norm = (nn.Parameter(torch.zeros(rows, 3, dtype=dtype)) for rows in (4, 1))

    def load_weights(self, tensors) -> None:
        places = {"q": self.qk[:2], "k": self.qk[2:], "norm": self.norm}
        for name, tensor in tensors:
            places[name].data.copy_(tensor)


@pytest.fixture
def worker(monkeypatch):
    """Makes the extension around a model, as vLLM's worker inherits it."""
    monkeypatch.syspath_prepend(str(INSIDE))
    for name in STUBS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    layers = sys.modules[STUBS[-1]]
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    sys.modules[STUBS[-2]].utils = layers
    for name in ("vllm_cpu_worker", "broadcast_member", "vllm_adapters"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("vllm_cpu_worker")

    def make(dtype: torch.dtype = torch.float32):
        made, model = module.WeightsExtension(), Fused(dtype)
        made.model_runner = SimpleNamespace(get_model=lambda: model)
        return made

    yield make
    for name in ("vllm_cpu_worker", "broadcast_member", "vllm_adapters"):
        sys.modules.pop(name, None)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"q": torch.randn(2, 3), "k": torch.randn(2, 3), "norm": torch.randn(1, 3)}


def arrived(worker, tensors: dict[str, torch.Tensor]) -> None:
    worker.mrl_arriving = Future()
    worker.mrl_arriving.set_result(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_counts_as_published_as_long_as_it_is_its_rounding(worker, dtype):
    """One element that is another number afterwards is named, in either type."""
    one, tensors = worker(dtype), drawn(1)
    assert one.mrl_checksums() == {}
    arrived(one, tensors)

    assert one.mrl_arrival() == {}
    assert one.mrl_serve_arrived() == {}

    wanted = {name: digest(tensor) for name, tensor in tensors.items()}
    assert one.mrl_checksums() == wanted
    one.model_runner.get_model().qk.data[2, 1] += 1.0
    held = one.mrl_checksums()
    assert {name for name in wanted if held[name] != wanted[name]} == {"k"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("k"), "not written"),
        (lambda tensors: tensors["q"].fill_(float("nan")), "not a number"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), "other"),
        (lambda tensors: tensors.update(q=torch.zeros(5, 3)), "Error"),
    ],
)
def test_what_does_not_fit_changes_nothing(worker, change, why):
    """The old tensors are served on, to the bit."""
    one, first, second = worker(), drawn(1), drawn(2)
    arrived(one, first)
    assert one.mrl_serve_arrived() == {}
    change(second)
    arrived(one, second)

    assert why in one.mrl_serve_arrived()["refused"]

    assert one.mrl_checksums() == {name: digest(tensor) for name, tensor in first.items()}


def test_a_broadcast_is_awaited_lost_or_refused(worker):
    """Whoever asks is told at once; only one that came apart is worth another way."""
    one = worker()
    one.mrl_arriving = Future()
    assert one.mrl_arrival() == {"awaited": ""}
    for error, told in (
        (ConnectionError("gone"), {"lost": "ConnectionError: gone"}),
        (ValueError("other bytes"), {"refused": "ValueError: other bytes"}),
        (RuntimeError("can't allocate memory"), {"refused": "RuntimeError: can't allocate memory"}),
    ):
        one.mrl_arriving = Future()
        one.mrl_arriving.set_exception(error)
        assert one.mrl_arrival() == told


def test_a_broadcast_is_received_in_a_thread_of_its_own(worker):
    """A seat for more than there can be: there is no memory, which is no lost member."""
    one = worker()
    seat = {"buckets": [[["w", "float32", [10**13]]]], "digests": {}}

    one.mrl_join(json.dumps(seat))

    with pytest.raises(RuntimeError, match="memory"):
        one.mrl_arriving.result(20.0)
