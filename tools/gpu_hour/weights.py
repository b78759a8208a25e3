"""The way of new weights from a learner to an engine, part by part, each beside one plain copy of the same bytes."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash
from torch import Tensor, nn

from gpu_hour.bench import Bench
from gpu_hour.shapes import config_of, random_model
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.models.number_formats import NumberFormat
from mrl.models.parameters import weight_sources, whole_weights
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, gap_nats, make_canary
from mrl.weights.manifest import Canary, differing, read_manifest
from mrl.weights.publish import Publisher

DTYPE: NumberFormat = "bfloat16"
PARTS = ("make the canary", "publish", "load", "score the canary", "read back and hash")
T = TypeVar("T")


def weights_parts() -> dict[str, Callable[[Bench], None]]:
    """Parts of the stage: the highest speed of each step, and the ways that runs take, by files and shared memory."""
    from gpu_hour.shared_weights import measure_sharing

    return {"steps": measure_steps, "way": measure_way, "sharing": measure_sharing}


def measure_steps(bench: Bench) -> None:
    """Measure the speeds of torch and of the file system themselves."""
    whole = torch.randn(bench.of(1 << 29, 1 << 20), device=bench.device)
    half = whole.bfloat16()
    size = half.nbytes
    copy_s = bench.seconds(half.clone)
    pageable = torch.empty_like(half, device="cpu")
    pinned = torch.empty(half.shape, dtype=half.dtype, pin_memory=bench.device == "cuda")
    other, path = torch.empty_like(pageable), bench.scratch / "bytes"
    pageable.copy_(half)
    seconds = {
        "copy on the device": copy_s,
        "cast to bfloat16 on the device": bench.seconds(lambda: whole.to(torch.bfloat16)),
        "device to host, fresh memory": bench.seconds(half.cpu),
        "device to host, pageable": bench.seconds(lambda: pageable.copy_(half)),
        "device to host, pinned": bench.seconds(lambda: pinned.copy_(half, non_blocking=True)),
        "host to device, pinned": bench.seconds(lambda: half.copy_(pinned, non_blocking=True)),
        "copy on the host": bench.seconds(lambda: other.copy_(pageable)),
        "XXH3 on the host": bench.seconds(lambda: xxhash.xxh3_128_hexdigest(_bytes(pageable))),
        "write": bench.seconds(lambda: path.write_bytes(_bytes(pageable))),
        "read": bench.seconds(lambda: _read_into(path, other)),
    }
    for name, spent_s in seconds.items():
        _tell(bench, name, spent_s, size, seconds["copy on the host"])
    path.unlink()


def measure_way(bench: Bench) -> None:
    """Measure publishing from the device, loading into an embedded engine there, and proving, in bytes of the files.

    As in a run of one host, engines compute in bfloat16 and read new weights in the learner's memory.
    """
    config = config_of(bench.of("1.7B", "tiny"))
    model = random_model(config, bench.device)
    model.save_pretrained(bench.scratch / "model")
    (bench.scratch / "model" / "tokenizer.json").write_text("{}")
    engine = EmbeddedEngine(
        bench.scratch / "model", Sampling(1.0, 8, (1,)), device=bench.device, max_running=4, dtype=DTYPE
    )
    publisher = Publisher(
        bench.scratch / "weights", "gpu-hour", dtype=DTYPE, in_memory=True, on_gpu=bench.device == "cuda"
    )
    ids = canary_sequences(config.vocab_size)
    spent: dict[str, float] = {}
    for step in range(3):  # the first two make the memory that all others use
        change(model)
        version, spent = Version(0, step), {}
        canary = timed(bench, spent, "make the canary", partial(make_canary, model, ids, DTYPE))
        path = timed(bench, spent, "publish", partial(_publish, publisher, model, version, canary))
        manifest = read_manifest(path)
        timed(bench, spent, "load", partial(engine.load, path.parent, version, manifest.tensors))
        spent["engine still while loading"] = engine.paused_s
        scored = timed(bench, spent, "score the canary", partial(engine.score, ids))
        held = timed(bench, spent, "read back and hash", engine.checksums)
        if wrong := differing(manifest, held):
            raise RuntimeError(f"the engine serves other bytes than were published in {wrong[:3]}")
    files = [file for file in path.parent.iterdir() if file.suffix == ".safetensors"]
    size = sum(file.stat().st_size for file in files)
    began_s = time.perf_counter()
    (bench.scratch / "copy").write_bytes(files[0].read_bytes())
    copy_s = (time.perf_counter() - began_s) * size / files[0].stat().st_size
    spent = {"copy of the files": copy_s} | spent | {"learner to proved": sum(spent[name] for name in PARTS)}
    for name, spent_s in spent.items():
        _tell(bench, name, spent_s, size, copy_s)
    gap = gap_nats(manifest.canary, scored)
    bench.tell("engine beside learner", gap.mean_nats, "nats", max_nats=gap.max_nats, noise_nats=gap.noise_nats)
    bench.tell("bytes compared", len(held.keys() & manifest.served.keys()) / len(manifest.served), "share")
    publisher.close()
    engine.close()


def _publish(publisher: Publisher, model: nn.Module, version: Version, canary: Canary) -> Path:
    told: list[Path] = []
    publisher.begin(weight_sources(model), version, canary, told.append)
    publisher.finish()
    return told[0]


def timed(bench: Bench, spent: dict[str, float], name: str, act: Callable[[], T]) -> T:
    """Call `act` and return its value; its seconds go to `spent`."""
    bench.settle()
    began_s = time.perf_counter()
    found = act()
    bench.settle()
    spent[name] = time.perf_counter() - began_s
    return found


def _tell(bench: Bench, name: str, seconds: float, size_bytes: int, copy_s: float) -> None:
    seconds = max(seconds, 1e-9)
    bench.tell(
        name, size_bytes / seconds / 1e9, "GB/s", seconds=seconds, copies=seconds / copy_s, size_bytes=size_bytes
    )


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Change the value of every weight."""
    for _, tensor in whole_weights(model):
        if tensor.is_floating_point():
            tensor.mul_(1.0 + 1e-3)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _read_into(path: Path, tensor: Tensor) -> None:
    with path.open("rb", buffering=0) as file:
        view, filled = _bytes(tensor), 0
        while filled < len(view):
            filled += file.readinto(view[filled:]) or 0
