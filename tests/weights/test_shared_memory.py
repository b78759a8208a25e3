"""New weights that lie on the learner's device: memory of a CPU stands for that of a GPU."""

import os
import shutil
import subprocess
import sys
from inspect import getsource
from pathlib import Path

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from mrl.engines import embedded
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import WeightsError
from mrl.models.memory_file import SHARED, SharedMemory, SharedTensors, shared_tensors
from mrl.models.parameters import plain_sources, weight_sources
from mrl.models.tensor_file import read_folder
from mrl.records.version import Version
from mrl.weights import staging
from mrl.weights.manifest import Canary, read_manifest
from mrl.weights.publish import Publisher
from mrl.weights.read_lock import read_lock
from mrl.weights.staging import Staging

NO_CANARY = Canary([], [], [])
CPU = torch.device("cpu")
INSIDE = Path(__file__).parents[2] / "mrl" / "engines" / "inside"


@pytest.fixture
def engine(tiny_model, tmp_path) -> EmbeddedEngine:
    tiny_model(seed=9).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return EmbeddedEngine(tmp_path / "model", Sampling(1.0, 4, (1,)), device="cpu", max_running=2, dtype="bfloat16")


def published(model, folder: Path, step: int, *, num_ranks: int = 1) -> Path:
    """By a publisher for each rank."""
    ranks = [
        Publisher(folder, "a", dtype="bfloat16", in_memory=True, shares_on=CPU, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    for rank in reversed(ranks):
        rank.begin(weight_sources(model), Version(0, step), NO_CANARY)
    for rank in ranks:
        rank.finish()
    return folder / str(Version(0, step)) / "manifest.json"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_takes_weights_from_the_learners_device(tiny_model, engine, tmp_path, monkeypatch, num_ranks):
    """No file is read, and the bytes are those of the manifest."""
    monkeypatch.setattr(embedded, "read_folder", None)
    for step in (1, 2):
        path = published(tiny_model(seed=step), tmp_path / "weights", step, num_ranks=num_ranks)
        manifest = read_manifest(path)

        engine.load(path.parent, Version(0, step), manifest.tensors)

        assert engine.version == Version(0, step)
        assert engine.checksums() == manifest.tensors
        assert read_folder(path.parent) == manifest.tensors, "the files say the same"


def test_an_engine_that_cannot_see_them_says_so_and_reads_files(tiny_model, engine, tmp_path):
    """As where the GPU is another container's."""
    path = published(tiny_model(seed=1), tmp_path / "weights", 1)
    told = path.with_name(f"model{SHARED}")
    said = msgspec.json.decode(told.read_bytes(), type=SharedTensors)
    told.write_bytes(msgspec.json.encode(msgspec.structs.replace(said, handle="/proc/1/fd/999")))
    with capture_logs() as lines:
        engine.load(path.parent, Version(0, 1), read_manifest(path).tensors)
    assert [line["log_level"] for line in lines] == ["warning"]
    assert "from files, not from the learner's GPU" in lines[0]["event"]
    assert engine.checksums() == read_manifest(path).tensors


@pytest.mark.parametrize("damage", ["bytes", "table", "no JSON"])
def test_what_is_damaged_there_is_never_served(tiny_model, engine, tmp_path, damage):
    """One bit of one tensor, or of what is said of it."""
    path = published(tiny_model(seed=1), tmp_path / "weights", 1)
    told = path.with_name(f"model{SHARED}")
    said = msgspec.json.decode(told.read_bytes(), type=SharedTensors)
    if damage == "bytes":
        with open(said.handle, "r+b") as memory:
            memory.seek(said.num_bytes // 2)
            byte = memory.read(1)[0]
            memory.seek(said.num_bytes // 2)
            memory.write(bytes([byte ^ 1]))
    else:
        fewer = msgspec.json.encode(msgspec.structs.replace(said, tensors=said.tensors[1:]))
        told.write_bytes(fewer if damage == "table" else b"{")
    engine.label(Version(0, 0))
    before = engine.checksums()
    with pytest.raises(WeightsError, match=r"checksum of|do not add up|cannot read the description"):
        engine.load(path.parent, Version(0, 1), read_manifest(path).tensors)
    assert (engine.version, engine.checksums()) == (Version(0, 0), before)


def test_what_an_engine_reads_there_is_not_written_over(tmp_path):
    """The lock of the files holds for both; a version for which there is no room goes by files alone."""
    publisher = Publisher(tmp_path, "a", in_memory=True, shares_on=CPU)

    def publish(step: int) -> Path:
        weights = {"w": torch.full((1000,), float(step)), "b": torch.full((3,), step, dtype=torch.int8)}
        return publisher.publish_weights(weights.items(), Version(0, step), NO_CANARY).parent

    def held(folder: Path) -> float:
        (shared,) = shared_tensors(folder)
        return float(torch.frombuffer(bytearray(Path(shared.handle).read_bytes()[:4]), dtype=torch.float32))

    assert [held(publish(step)) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    read = publish(4)
    with read_lock(read):
        later = [publish(step) for step in range(5, 9)]
        assert held(read) == 4.0
    assert [bool(shared_tensors(folder)) for folder in later if folder.exists()].count(True) == 1
    with capture_logs() as lines:
        assert [held(publish(step)) for step in range(9, 18)] == [float(step) for step in range(9, 18)]
    assert lines == [], "the memory is all there again"
    publisher.close()


LEARNER = """
import sys
from pathlib import Path
import torch
from mrl.models.parameters import named_weights
from mrl.records.version import Version
from mrl.weights.manifest import Canary
from mrl.weights.publish import Publisher
from transformers import AutoModelForCausalLM
folder = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder / "model")
one = Publisher(folder / "weights", "a", dtype="bfloat16", in_memory=True, shares_on=torch.device("cpu"))
print(one.publish_weights(named_weights(model).items(), Version(0, 1), Canary([], [], [])), flush=True)
sys.stdin.read()
"""


def test_what_a_dead_learner_had_is_refused_and_the_next_one_is_served(tiny_model, engine, tmp_path):
    """Killed before its engine looks, and while the engine holds the version."""
    words = [sys.executable, "-c", LEARNER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as learner:
        path = Path(learner.stdout.readline().strip())
        wanted = read_manifest(path).tensors
        engine.load(path.parent, Version(0, 1), wanted)
        assert engine.checksums() == wanted
        with read_lock(path.parent):
            learner.kill()
            learner.wait()
            with capture_logs() as lines, pytest.raises(WeightsError, match="cannot be read"):
                engine.load(path.parent, Version(0, 2), wanted)
    assert ["from files" in line["event"] for line in lines] == [True]
    with pytest.raises(WeightsError, match="a process that has ended"), read_lock(path.parent):
        pass
    assert (engine.version, engine.checksums()) == (Version(0, 1), wanted)

    later = published(tiny_model(seed=3), tmp_path / "later", 3)
    with read_lock(later.parent):
        engine.load(later.parent, Version(0, 3), read_manifest(later).tensors)
        assert engine.checksums() == read_manifest(later).tensors != wanted


def test_a_version_that_lasts_is_whole_on_the_disk(tmp_path, monkeypatch):
    """It is copied from memory that is filled from the device only then."""
    slow = staging._bring
    began = []

    def bring(part, target):
        while not began:
            continue
        return slow(part, target)

    monkeypatch.setattr(staging, "_bring", bring)
    publisher = Publisher(tmp_path, "a", in_memory=True, shares_on=CPU)
    weights = {str(number): torch.randn(1000) for number in range(50)}
    publisher.begin(plain_sources(weights.items()), Version(0, 1), NO_CANARY, lasts=True)
    began.append(True)
    publisher.finish()
    folder = tmp_path / "0.1"
    assert read_folder(folder) == read_manifest(folder / "manifest.json").tensors
    assert not list(folder.glob(f"*{SHARED}"))


def test_threads_that_copy_from_a_gpu_stay_on_it(monkeypatch):
    """A new thread has the first GPU; `torch.cuda.stream` returns there, and whoever sets a GPU has a context on it."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    gpu = torch.device("cuda", 3)
    one = Staging("a", dtype="", rank=3, num_ranks=8, pinned=False, num_kept=0, shares_on=gpu)
    assert one._threads.submit(lambda: list(used)).result() == [gpu]
    one.close()
    assert "torch.cuda.set_stream(self.src_prev_stream)" in getsource(torch.cuda.StreamContext.__exit__)


def test_a_device_that_shares_nothing_is_told_of_once(tmp_path, monkeypatch):
    """Such as a part of a GPU (MIG): versions go by files."""

    def refuse(*arguments):
        raise OSError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(staging, "SharedMemory", refuse)
    publisher = Publisher(tmp_path, "a", in_memory=True, shares_on=CPU)
    with capture_logs() as lines:
        for step in (1, 2, 3):
            path = publisher.publish_weights({"w": torch.randn(9)}.items(), Version(0, step), NO_CANARY)
            assert read_folder(path.parent) == read_manifest(path).tensors
    assert [line["reason"] for line in lines] == ["cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"]
    publisher.close()


@pytest.mark.parametrize(("num_failing", "shares"), [(1, [True] * 6), (99, [True] + [False] * 5)])
def test_a_device_that_has_no_room_for_a_second_version_shares_none(tmp_path, monkeypatch, num_failing, shares):
    """Once torch has given back what it keeps there is one more try; else the first one's memory is given back too."""
    made, closed, given_back, failed, close = [], [], [], [], SharedMemory.close

    def make(*arguments):
        if made and len(failed) < num_failing:
            failed.append(len(given_back))
            raise OSError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        made.append(SharedMemory(*arguments))
        return made[-1]

    monkeypatch.setattr(staging, "SharedMemory", make)
    monkeypatch.setattr(SharedMemory, "close", lambda one: closed.append(one) or close(one))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    publisher = Publisher(tmp_path, "a", in_memory=True, shares_on=CPU)
    with capture_logs() as lines:
        for step, is_shared in enumerate(shares):
            path = publisher.publish_weights({"w": torch.randn(9)}.items(), Version(0, step), NO_CANARY)
            assert bool(shared_tensors(path.parent)) == is_shared
            assert read_folder(path.parent) == read_manifest(path).tensors
    assert failed == [0, 1][:num_failing]
    assert len(lines) == (num_failing > 1)
    assert closed == (made if num_failing > 1 else [])
    publisher.close()


DRIVER = """
#include <stdlib.h>
#include <string.h>
#define IN_CONTEXT if (!has_context) return 201
typedef struct { unsigned char reserved[64]; } Handle;
typedef unsigned long long Address;
static __thread int has_context;
static Address opened;
int enter(void) { return !(has_context = 1); }
int cuMemAlloc_v2(Address *address, size_t size) { IN_CONTEXT; return !(*address = (Address)malloc(size)); }
int cuMemFree_v2(Address address) { IN_CONTEXT; free((void *)address); return 0; }
int cuIpcGetMemHandle(Handle *handle, Address address) {
    IN_CONTEXT;
    for (int i = 0; i < 64; i++) handle->reserved[i] = i;
    memcpy(handle->reserved + 56, &address, 8);
    return 0;
}
int cuIpcOpenMemHandle_v2(Address *address, Handle handle, unsigned flags) {
    IN_CONTEXT;
    for (int i = 0; i < 56; i++) if (handle.reserved[i] != i) return 1;
    if (flags != 1 || opened) return 1;
    memcpy(&opened, handle.reserved + 56, 8);
    *address = opened;
    return 0;
}
int cuIpcCloseMemHandle(Address address) {
    IN_CONTEXT;
    if (address != opened) return 1;
    opened = 0;
    return 0;
}
int cuMemcpyAsync(Address to, Address from, size_t size, void *stream) {
    IN_CONTEXT;
    if (stream != (void *)0x700000005ULL) return 1;
    memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
"""
CALLS = """
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
import shared_memory
import torch
from mrl.models import memory_file
from mrl.models.tensor_file import TensorShape
driver, gpu = ctypes.CDLL("libcuda.so.1"), torch.device("cuda:0")
stream = SimpleNamespace(cuda_stream=0x700000005, wait_stream=lambda other: None, synchronize=lambda: None)
torch.cuda.set_device, torch.cuda.mem_get_info = lambda device: None, lambda device: driver.enter()
torch.cuda.Stream = torch.cuda.current_stream = lambda device: stream
memory_file.gpu_id = lambda device: "GPU-0"

def at(one, device):
    about = one.__cuda_array_interface__
    return torch.frombuffer((ctypes.c_ubyte * about["shape"][0]).from_address(about["data"][0]), dtype=torch.uint8)

def in_thread(work):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()

def read_as_learner(told):
    target = torch.zeros(5, dtype=torch.uint8)
    with memory_file._opened(told, gpu) as copy:
        copy(2, target)
    return target.tolist()

def read_as_vllm(told):
    def read():
        opened, target = shared_memory.OpenMemory(told.gpu, told.handle, told.num_bytes, gpu), torch.zeros(5).byte()
        opened.read(2, target)
        return opened, target.tolist()
    opened, found = in_thread(read)
    in_thread(opened.close)
    return found

torch.as_tensor = at
module, read = {"learner": (memory_file, read_as_learner), "vllm": (shared_memory, read_as_vllm)}[sys.argv[1]]
own = in_thread(lambda: memory_file.SharedMemory(7, gpu))
own.flat.copy_(torch.arange(7))
told = own.described([TensorShape("w", "U8", [7])])
for _ in range(2):
    print(in_thread(lambda: read(told)))
in_thread(own.close)
try:
    in_thread(lambda: module.call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(1)))
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("reader", ["learner", "vllm"])
def test_the_drivers_functions_get_what_its_header_says(tmp_path, reader):
    """In any thread, each of which has to enter torch's context. A library with cuda.h's signatures stands for it."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(INSIDE)}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, reader],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[2, 3, 4, 5, 6]"] * 2 + ["cuIpcCloseMemHandle: CUDA_ERROR_INVALID_CONTEXT"]
