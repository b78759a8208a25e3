"""How weights come into vLLM's worker on a CPU, seen with a model that fuses two tensors; vLLM is not needed."""

import importlib
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from mrl.models.tensor_file import digest

INSIDE = Path(__file__).parents[2] / "mrl" / "engines" / "inside"
MODULES = ("vllm_cpu_worker", "arriving_weights", "broadcast_member", "vllm_adapters")
LAYERS = "vllm.model_executor.layers"
MIXTURE = f"{LAYERS}.fused_moe"
STUBS = ("vllm", "vllm.model_executor", LAYERS, f"{LAYERS}.utils", MIXTURE, f"{MIXTURE}.activation")
STUBS += (f"{MIXTURE}.experts", f"{MIXTURE}.experts.cpu_moe")


class Fused(nn.Module):
    """Takes "q" and "k", and computes with both in one parameter; "norm" as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qk, self.norm = (nn.Parameter(torch.zeros(rows, 3, dtype=dtype)) for rows in (4, 1))

    def load_weights(self, tensors) -> None:
        places = {"q": self.qk[:2], "k": self.qk[2:], "norm": self.norm}
        for name, tensor in tensors:
            places[name].data.copy_(tensor)


def silu_and_multiply(activation, output, gate_up, *, activation_config) -> None:
    """As vLLM's own."""
    gate, up = gate_up.chunk(2, dim=-1)
    output.copy_(nn.functional.silu(gate) * up)


@pytest.fixture
def worker(monkeypatch):
    """Makes the extension around a model, as vLLM's worker inherits it."""
    monkeypatch.syspath_prepend(str(INSIDE))
    for name in STUBS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    layers = sys.modules[f"{LAYERS}.utils"]
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    sys.modules[LAYERS].utils = layers
    sys.modules[f"{MIXTURE}.activation"].ApplyMoEActivationConfig = Mock()
    sys.modules[f"{MIXTURE}.activation"].apply_moe_activation = silu_and_multiply
    experts = {"process_weights_after_loading": print, "apply": print}
    sys.modules[f"{MIXTURE}.experts.cpu_moe"].CPUUnquantizedExperts = type("CPUUnquantizedExperts", (), experts)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("vllm_cpu_worker")

    def make(dtype: torch.dtype = torch.float32):
        made, model = module.CpuWeightsExtension(), Fused(dtype)
        made.model_runner = SimpleNamespace(get_model=lambda: model)
        return made

    yield make
    for name in MODULES:
        sys.modules.pop(name, None)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"q": torch.randn(2, 3), "k": torch.randn(2, 3), "norm": torch.randn(1, 3)}


def held(worker) -> dict[str, str]:
    """What it computes with, by its own word."""
    worker.mrl_look()
    worker.mrl_looking.result(120.0)
    return worker.mrl_checksums()


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def taken(worker, folder: Path, tensors: dict[str, torch.Tensor], wanted: dict[str, str]) -> dict[str, str]:
    """What it says of a folder with these tensors, in two files."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
    worker.mrl_take(json.dumps({"folder": str(folder), "digests": wanted}))
    worker.mrl_arriving.exception(20.0)
    return worker.mrl_arrival()


def arrived(worker, tensors: dict[str, torch.Tensor]) -> None:
    worker.mrl_arriving = Future()
    worker.mrl_arriving.set_result(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_counts_as_published_as_long_as_it_is_its_rounding(worker, dtype):
    """One element that is another number afterwards is named, in either type."""
    one, tensors = worker(dtype), drawn(1)
    assert held(one) == {}
    arrived(one, tensors)

    assert one.mrl_arrival() == {}
    assert one.mrl_serve_arrived() == {}

    wanted = {name: digest(tensor) for name, tensor in tensors.items()}
    assert held(one) == wanted
    one.model_runner.get_model().qk.data[2, 1] += 1.0
    found = held(one)
    assert {name for name in wanted if found[name] != wanted[name]} == {"k"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("k"), "not written"),
        (lambda tensors: tensors["q"].fill_(float("nan")), "NaN"),
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

    assert held(one) == digests(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_written_beside_what_is_served_and_then_takes_its_place(worker, tmp_path, dtype):
    """The first is put where it belongs by the model's own loader; those that follow go there at once."""
    one, model = worker(dtype), None
    for number in range(1, 5):
        before = model.qk.clone() if model else None
        tensors = drawn(number)
        assert taken(one, tmp_path / str(number), tensors, digests(tensors)) == {}
        assert is_direct(one) == (number > 1)
        model = one.model_runner.get_model()
        assert before is None or torch.equal(model.qk, before), "it serves on until it is told"

        assert one.mrl_serve_arrived() == {}

        assert held(one) == digests(tensors)
        assert torch.equal(model.qk, torch.cat([tensors["q"], tensors["k"]]).to(dtype))
    assert len({model.qk.data_ptr(), one.mrl_spare["qk"].data_ptr()}) == 2, "two of each are enough"


def is_direct(worker) -> bool:
    return hasattr(worker.mrl_arriving.result(), "parameters")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors["q"].add_(1e-6), "checksums differ from the published ones: q"),
        (
            lambda tensors: tensors.update(q=tensors["k"], k=tensors["q"]),
            "checksums differ from the published ones: q, k",
        ),
        (lambda tensors: tensors.pop("k"), "checksums differ from the published ones: k"),
    ],
)
def test_a_folder_that_is_not_what_was_published_is_never_served(worker, tmp_path, is_first, change, why):
    """It is refused before anything stops, and the next one is served."""
    one, first, second = worker(), drawn(1), drawn(2)
    wanted = digests(second)
    if not is_first:
        assert taken(one, tmp_path / "first", first, digests(first)) == {}
        assert one.mrl_serve_arrived() == {}
    change(second)

    assert why in taken(one, tmp_path / "second", second, wanted)["refused"]

    assert held(one) == ({} if is_first else digests(first))
    third = drawn(3)
    assert taken(one, tmp_path / "third", third, digests(third)) == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(third)


def test_a_number_that_is_none_is_refused_beside_what_is_served(worker, tmp_path):
    """As it is when the model's own loader reads it."""
    one, first, second = worker(), drawn(1), drawn(2)
    assert taken(one, tmp_path / "first", first, digests(first)) == {}
    assert one.mrl_serve_arrived() == {}
    second["k"][1, 1] = float("nan")

    assert "NaN" in taken(one, tmp_path / "second", second, digests(second))["refused"]


def test_other_shapes_go_through_the_models_own_loader(worker, tmp_path):
    """Which refuses them, and what was served stays."""
    one, first, second = worker(), drawn(1), drawn(2)
    assert taken(one, tmp_path / "first", first, digests(first)) == {}
    assert one.mrl_serve_arrived() == {}
    second["q"] = torch.zeros(5, 3)
    assert taken(one, tmp_path / "second", second, digests(second)) == {}

    assert "Error" in one.mrl_serve_arrived()["refused"]

    assert held(one) == digests(first)


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
        one.mrl_arriving.result(120.0)


@pytest.mark.parametrize("weighed", [False, True])
def test_experts_compute_with_the_parameters_as_they_are(worker, weighed):
    """As transformers does; nothing packs them. With one expert a token its input may be weighed before."""
    worker()
    cpu_moe = sys.modules[f"{MIXTURE}.experts.cpu_moe"].CPUUnquantizedExperts
    torch.manual_seed(5)
    config = Qwen3MoeConfig(hidden_size=6, moe_intermediate_size=4, num_experts=5, experts_implementation="eager")
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    per_token = 1 if weighed else 3
    hidden, chosen = torch.randn(7, 6), torch.stack([torch.randperm(5)[:per_token] for _ in range(7)])
    weights, output = torch.rand(7, per_token), torch.full((7, 6), torch.nan)
    wanted = experts(hidden, chosen, torch.ones_like(weights) if weighed else weights)
    before = [parameter.clone() for parameter in experts.parameters()]
    kernel = cpu_moe()
    kernel.moe_config = kernel.quant_config = kernel.w1_bias = kernel.w2_bias = None

    kernel.process_weights_after_loading(experts)
    kernel.apply(
        output=output,
        hidden_states=hidden,
        w1=experts.gate_up_proj.detach(),
        w2=experts.down_proj.detach(),
        topk_weights=weights,
        topk_ids=chosen.to(torch.int32),
        activation="silu",
        apply_router_weight_on_input=weighed,
        expert_map=None,
    )

    torch.testing.assert_close(output, wanted.detach())
    assert all(torch.equal(one, other) for one, other in zip(experts.parameters(), before, strict=True))
