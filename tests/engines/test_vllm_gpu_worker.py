"""How weights come into vLLM's worker on a GPU: its reload is a stand-in here, and the device a CPU."""

import ast
import importlib
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mrl.models.memory_file import shared_tensors
from mrl.models.parameters import plain_sources
from mrl.models.tensor_file import digest
from mrl.records.version import Version
from mrl.weights.manifest import Canary
from mrl.weights.publish import Publisher

INSIDE = Path(__file__).parents[2] / "mrl" / "engines" / "inside"
MODULES = ("vllm_gpu_worker", "arriving_weights", "broadcast_member", "vllm_adapters", "shared_memory")
QKV, MLP, HEAD = "layers.0.attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight", "lm_head.weight"
W13, W2 = (f"layers.0.mlp.experts.routed_experts.{name}_weight" for name in ("w13", "w2"))
SHAPES = {QKV: (8, 3), MLP: (6, 3), HEAD: (64, 3), "layers.0.norm.weight": (3,), W13: (2, 8, 3), W2: (2, 3, 4)}
PLACES = {
    "lm_head.weight": (HEAD, 0, 5),  # filled up with zeros
    "layers.0.mlp.up_proj.weight": (MLP, 3, 3),
    "layers.0.mlp.gate_proj.weight": (MLP, 0, 3),
    "layers.0.attn.v_proj.weight": (QKV, 6, 2),
    "layers.0.attn.k_proj.weight": (QKV, 4, 2),
    "layers.0.attn.q_proj.weight": (QKV, 0, 4),
    "layers.0.norm.weight": ("layers.0.norm.weight", 0, 3),
}
EXPERTS = {
    f"layers.0.mlp.experts.{expert}.{module}.weight": (served, expert, rows, shape)
    for expert in (0, 1)
    for module, served, rows, shape in (
        ("gate_proj", W13, slice(0, 4), (4, 3)),
        ("up_proj", W13, slice(4, 8), (4, 3)),
        ("down_proj", W2, slice(0, 3), (3, 4)),
    )
}


class Served(nn.Module):
    """Fused parameters, some below adapters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}

    def named_parameters(self, *arguments, **named):
        return [(name.replace(".weight", ".base_layer.weight"), part) for name, part in self.parts.items()]

    def load(self, tensors) -> None:
        for name, tensor in tensors:
            if name in EXPERTS:
                served, expert, rows, _ = EXPERTS[name]
                self.parts[served].data[expert][rows].copy_(tensor)
            else:
                served, first, count = PLACES[name]
                self.parts[served].data[first : first + count].copy_(tensor)


@pytest.fixture
def worker(monkeypatch):
    """Makes the extension around a model, as vLLM's worker inherits it."""
    monkeypatch.syspath_prepend(str(INSIDE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("vllm_gpu_worker")
    monkeypatch.setattr(module, "COMPARED_BYTES", 16)

    def make(dtype: torch.dtype = torch.float32):
        made, model = module.GpuWeightsExtension(), Served(dtype)
        made.model_runner, made.device = SimpleNamespace(get_model=lambda: model), torch.device("cpu")
        made.reload_weights = lambda weights_iterator, is_checkpoint_format: model.load(weights_iterator)
        return made

    yield make
    for name in MODULES:
        sys.modules.pop(name, None)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    experts = {name: torch.randn(shape) for name, (*_, shape) in EXPERTS.items()}
    return experts | {name: torch.randn(count, *SHAPES[served][1:]) for name, (served, _, count) in PLACES.items()}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def taken(worker, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    worker.mrl_take(json.dumps({"folder": str(folder), "digests": digests(tensors)}))
    worker.mrl_arriving.exception(20.0)
    return worker.mrl_arrival()


def shared(worker, folder: Path, tensors: dict[str, torch.Tensor]) -> Publisher:
    """As `taken`, of tensors that lie on their learner's device; the files have no bytes of them."""
    publisher = Publisher(folder, "a", in_memory=True, shares_on=torch.device("cpu"))
    path = publisher.publish_weights(tensors.items(), Version(0, 1), Canary([], [], []))
    (path.parent / "model.safetensors").unlink()
    (path.parent / "model.safetensors").write_bytes(b"")
    worker.mrl_take(json.dumps({"folder": str(path.parent), "digests": digests(tensors)}))
    worker.mrl_arriving.exception(20.0)
    return publisher


def held(worker) -> dict[str, str]:
    worker.mrl_look()
    worker.mrl_looking.result(120.0)
    return worker.mrl_checksums()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_reloaded_is_told_with_the_digests_of_what_was_read(worker, tmp_path, dtype):
    """Before, nothing is known; the host's memory is used again."""
    one = worker(dtype)
    assert held(one) == {}
    places = set()
    for number in (1, 2, 3):
        tensors = drawn(number)
        assert taken(one, tmp_path / str(number), tensors) == {}
        assert held(one) == {}, "what has arrived is not served yet"
        assert one.mrl_serve_arrived() == {}
        assert held(one) == digests(tensors)
        places.add(one.mrl_host[HEAD].data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (lambda parts: parts[QKV].data[4].add_(1e-6), {"layers.0.attn.k_proj.weight"}),
        (lambda parts: parts[MLP].data.copy_(parts[MLP].data.roll(3, 0)), {"gate_proj", "up_proj"}),
        (lambda parts: parts[HEAD].data[:5].zero_(), {"lm_head.weight"}),
        (lambda parts: parts["layers.0.norm.weight"].data.zero_(), {"layers.0.norm.weight"}),
    ],
    ids=["one element", "swapped", "stale", "half"],
)
def test_planted_faults_are_named(worker, tmp_path, fault, wrong):
    """Whatever vLLM's reload did, what layers compute with is looked at."""
    one, tensors = worker(), drawn(1)
    assert taken(one, tmp_path / "1", tensors) == {}
    assert one.mrl_serve_arrived() == {}

    fault(one.model_runner.get_model().parts)

    found, wanted = held(one), digests(tensors)
    assert {name for name in wanted if found[name] != wanted[name]} == {
        name for name in wanted if name in wrong or (name.split(".")[-2] in wrong and name not in EXPERTS)
    }


def test_what_is_read_back_is_read_on_the_gpu_of_the_worker(worker, tmp_path, monkeypatch):
    """Of several that share a model out each sees all GPUs; a new thread has the first one."""
    one, tensors, used = worker(), drawn(1), []
    assert taken(one, tmp_path / "1", tensors) == {}
    assert one.mrl_serve_arrived() == {}
    one.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((device, threading.get_ident())))
    assert held(one) == digests(tensors)
    ((device, thread),) = used
    assert device == one.device
    assert thread != threading.get_ident()


def test_what_is_split_over_gpus_is_left_out(worker, tmp_path):
    """Half of the rows prove nothing; the rest is told."""
    one, tensors = worker(), drawn(1)
    assert taken(one, tmp_path / "1", tensors) == {}
    assert one.mrl_serve_arrived() == {}
    parts = one.model_runner.get_model().parts
    parts[HEAD] = nn.Parameter(parts[HEAD].data[:3])

    assert held(one).keys() == digests(tensors).keys() - {HEAD}


@pytest.mark.parametrize(
    "moved", [lambda one: one.roll(4, 1), lambda one: one.flip(0), lambda one: one.mT.contiguous()]
)
def test_experts_that_a_kernel_has_moved_are_left_out(worker, tmp_path, moved):
    """Whether they are wrong or lie otherwise, their bytes do not tell: the canary decides."""
    one, tensors = worker(), drawn(1)
    assert taken(one, tmp_path / "1", tensors) == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(tensors)
    parts = one.model_runner.get_model().parts
    parts[W13] = nn.Parameter(moved(parts[W13].data))

    first = {name for name, (served, *_) in EXPERTS.items() if served == W13}
    assert held(one) == {name: its for name, its in digests(tensors).items() if name not in first}


def test_what_lies_on_the_learners_device_is_reloaded_from_there(worker, tmp_path):
    """No file is read and no memory of the host taken; once it was looked at, the learner may write over it."""
    one, tensors = worker(), drawn(1)
    shared(one, tmp_path / "1", tensors)
    assert one.mrl_arrival() == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(tensors)
    assert held(one) == {}, "nobody compares with what may be another version by now"
    assert not hasattr(one, "mrl_host")

    later = drawn(2)
    assert taken(one, tmp_path / "2", later) == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(later), "files, after it"


def test_tensors_of_a_module_come_together_whichever_rank_published_them(worker, tmp_path):
    """While vLLM reloads, no more is copied on its GPU than its largest module has: it waits until one is whole."""
    blocks = [f"layers.{block}.{module}" for block in range(12) for module in ("attn", "mlp")]
    rows = {"attn": {"q_proj": 32, "k_proj": 8, "v_proj": 8}, "mlp": {"gate_proj": 96, "up_proj": 96}}
    tensors = {
        f"{block}.{part}.weight": torch.zeros(count, 4)
        for block in blocks
        for part, count in rows[block.rpartition(".")[2]].items()
    } | {f"layers.{block}.mlp.down_proj.weight": torch.zeros(32, 12) for block in range(12)}
    ranks = [
        Publisher(tmp_path, "a", in_memory=True, shares_on=torch.device("cpu"), rank=rank, num_ranks=2)
        for rank in (0, 1)
    ]
    for one in reversed(ranks):
        one.begin(plain_sources(tensors.items()), Version(0, 1), Canary([], [], []))
    for one in ranks:
        one.finish()
    assert len(shared_tensors(tmp_path / "0.1")) == 2

    opened = sys.modules["shared_memory"].OpenVersion(tmp_path / "0.1", torch.device("cpu"))
    assert opened.tensors.keys() == tensors.keys()
    waiting, most = Counter(), 0
    for name in opened.tensors:
        module, part = name.removesuffix(".weight").rsplit(".", 1)
        waiting[module, part == "down_proj"] += len(tensors[name]) * tensors[name].shape[1]
        most = max(most, sum(waiting.values()))
        if waiting[module, part == "down_proj"] == {"attn": 48 * 4, "mlp": 192 * 4}[module.rpartition(".")[2]]:
            del waiting[module, False]
        del waiting[module, True]
    assert (waiting, most) == (Counter(), 192 * 4)


def test_faults_behind_a_reload_from_the_learners_device_are_named(worker, tmp_path):
    """As of files."""
    one, tensors = worker(), drawn(1)
    shared(one, tmp_path / "1", tensors)
    assert one.mrl_serve_arrived() == {}
    one.model_runner.get_model().parts[QKV].data[4].add_(1e-6)
    found, wanted = held(one), digests(tensors)
    assert {name for name in wanted if found[name] != wanted[name]} == {"layers.0.attn.k_proj.weight"}


def test_bytes_that_change_on_the_learners_device_behind_their_check_are_not_proved(worker, tmp_path):
    """Layers and the learner's memory agree then, on what nobody published."""
    one, tensors = worker(), drawn(1)
    shared(one, tmp_path / "1", tensors)
    assert one.mrl_arrival() == {}
    (said,) = shared_tensors(tmp_path / "1" / "0.1")
    with open(said.handle, "r+b") as memory:
        memory.write(bytes([7]) * said.num_bytes)
    assert one.mrl_serve_arrived() == {}
    found = held(one)
    assert found.keys() == tensors.keys()
    assert not set(found.values()) & set(digests(tensors).values())


def test_no_tensor_lies_on_the_device_as_a_whole_while_it_is_compared(worker, tmp_path, monkeypatch):
    """Beside vLLM's steps there is room for pieces alone."""
    one, tensors = worker(), drawn(1)
    shared(one, tmp_path / "1", tensors)
    assert one.mrl_serve_arrived() == {}
    monkeypatch.setattr(sys.modules["shared_memory"].SharedTensor, "here", None)
    assert held(one) == digests(tensors)
    assert one.mrl_room.nbytes == 16


def test_other_bytes_on_the_learners_device_are_refused(worker, tmp_path):
    """Before any of them is served."""
    one, tensors = worker(), drawn(1)
    shared(one, tmp_path / "1", tensors)
    lying = digests(drawn(2))
    one.mrl_take(json.dumps({"folder": str(tmp_path / "1" / "0.1"), "digests": lying}))
    one.mrl_arriving.exception(20.0)
    assert "checksums differ from the published ones" in one.mrl_arrival()["refused"]


def test_a_worker_that_cannot_see_the_learners_device_says_so_and_reads_files(worker, tmp_path, caplog):
    """In the server's log."""
    one, tensors = worker(), drawn(1)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.gpu").write_text('{"gpu": "GPU-1", "handle": "", "num_bytes": 0, "tensors": []}')
    save_file(tensors, tmp_path / "1" / "model.safetensors")
    one.mrl_take(json.dumps({"folder": str(tmp_path / "1"), "digests": digests(tensors)}))
    one.mrl_arriving.exception(20.0)
    assert one.mrl_arrival() == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(tensors)
    assert "from files, not from the learner's GPU: the tensors are on GPU-1, but are needed on cpu" in caplog.text


@pytest.mark.parametrize("failing", ["read", "close"])
def test_a_failure_of_the_device_is_told_and_files_are_read(worker, tmp_path, caplog, monkeypatch, failing):
    """What was opened is closed, by the next version at the latest."""
    one, tensors = worker(), drawn(1)
    memory, closed = sys.modules["shared_memory"].OpenMemory, []

    def fail(*arguments):
        raise RuntimeError("CUDA error: out of memory")

    def close(opened):
        closed.append(opened)
        if failing == "close":
            fail()

    monkeypatch.setattr(memory, "close", close)
    shared(one, tmp_path / "1", tensors)
    if failing == "read":
        monkeypatch.setattr(memory, "read", fail)
    publisher = Publisher(tmp_path / "2", "a", in_memory=True, shares_on=torch.device("cpu"))
    path = publisher.publish_weights(tensors.items(), Version(0, 1), Canary([], [], []))
    one.mrl_take(json.dumps({"folder": str(path.parent), "digests": digests(tensors)}))
    one.mrl_arriving.exception(20.0)
    assert one.mrl_arrival() == {}
    assert one.mrl_serve_arrived() == {}
    assert held(one) == digests(tensors)
    assert "from files, not from the learner's GPU: CUDA error: out of memory" in caplog.text
    assert len(closed) == {"read": 2, "close": 1}[failing]


def adapted(worker, folder: Path, *, wrong: float = 0.0) -> dict[str, str]:
    """What is told of adapters of one fused layer, of which vLLM has B times alpha / rank; and their digests."""
    torch.manual_seed(0)
    prefix = "base_model.model.layers.0.attn"
    tensors = {f"{prefix}.{part}_proj.lora_A.weight": torch.randn(2, 3) for part in "qk"}
    tensors |= {f"{prefix}.{part}_proj.lora_B.weight": torch.randn(4, 2) for part in "qk"}
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    save_file(tensors, folder / "adapter_model.safetensors")
    room = {factor: tuple(torch.zeros(2, 1, 8, 8) for _ in "qk") for factor in "AB"}  # two slots, each with room
    for number, part in enumerate("qk"):
        room["A"][number][1, 0, :2, :3] = tensors[f"{prefix}.{part}_proj.lora_A.weight"]
        room["B"][number][1, 0, :4, :2] = tensors[f"{prefix}.{part}_proj.lora_B.weight"] * 2 + wrong
    manager = SimpleNamespace(
        lora_index_to_id=[None, 7],
        modules={"layers.0.attn.qkv": SimpleNamespace(lora_a_stacked=room["A"], lora_b_stacked=room["B"])},
        packed_modules={"layers.0.attn.qkv": [f"layers.0.attn.{part}_proj" for part in "qk"]},
    )
    worker.model_runner.lora_manager = SimpleNamespace(_adapter_manager=manager)
    told = worker.mrl_adapter_checksums(str(folder))
    assert told.keys() == tensors.keys()
    return {name: its_digest for name, its_digest in told.items() if its_digest != digest(tensors[name])}


def test_adapters_that_layers_compute_with_are_told_with_the_digests_of_their_files(worker, tmp_path):
    """Of other numbers it is their own digest, by which they are found."""
    assert adapted(worker(), tmp_path) == {}
    assert {name.split(".")[-2] for name in adapted(worker(), tmp_path, wrong=0.5)} == {"lora_B"}


def test_whatever_is_called_by_name_is_there(worker):
    """vLLM looks a method up when it is called, and what it lacks would be an engine that is lost at every proof."""
    called = {
        argument.value
        for path in INSIDE.parent.glob("vllm*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("mrl_")
    }
    of_cpu = ast.parse((INSIDE / "vllm_cpu_worker.py").read_text())
    [extension] = [one for one in of_cpu.body if getattr(one, "name", "") == "CpuWeightsExtension"]
    has = {one.name for one in extension.body if isinstance(one, ast.FunctionDef)}
    base = sys.modules["arriving_weights"].ArrivingWeights

    assert "mrl_adapter_checksums" in called
    assert {name for name in called if not hasattr(worker(), name)} == set()
    assert called - has - set(dir(base)) == set()
