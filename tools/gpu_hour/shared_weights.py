"""New weights by way of the learner's device: a learner in a process of its own, and an engine that opens its memory.

python -m gpu_hour.shared_weights FOLDER DEVICE SHAPE runs that learner: a line on its input asks for a version
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from structlog.testing import capture_logs

from gpu_hour.bench import Bench
from gpu_hour.shapes import config_of, random_model
from gpu_hour.weights import DTYPE, change, timed
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.engines.inside.shared_memory import OpenVersion
from mrl.models.memory_file import shared_tensors
from mrl.models.parameters import weight_sources
from mrl.models.tensor_broadcast import numbered
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import differing, read_manifest
from mrl.weights.publish import Publisher


def measure_sharing(bench: Bench) -> None:
    """Measure publishing on the device, loading from there into an embedded engine on the same device, and proving.

    Raises RuntimeError where the engine took the files instead, or vLLM's extension would.
    """
    shape = bench.of("1.7B", "tiny")
    words = [sys.executable, "-m", "gpu_hour.shared_weights", str(bench.scratch / "sharing"), bench.device, shape]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as learner:
        asked, said = learner.stdin, learner.stdout
        assert asked is not None
        assert said is not None

        def publish() -> dict[str, Any]:
            asked.write("\n")
            asked.flush()
            told: dict[str, Any] = json.loads(said.readline() or '{"error": "the learner ended"}')
            return told

        publish()  # returns once the learner's model is there
        model = bench.scratch / "sharing" / "model"
        engine = EmbeddedEngine(model, Sampling(1.0, 8, (1,)), device=bench.device, max_running=4, dtype=DTYPE)
        with closing(engine):
            for _ in range(3):  # the first two make the memory that all others use
                spent, size = _take(bench, engine, publish())
        for name, spent_s in spent.items():
            bench.tell(name, size / spent_s / 1e9, "GB/s", seconds=spent_s, size_bytes=size)
        asked.close()


def _take(bench: Bench, engine: EmbeddedEngine, told: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Install one published version; return the seconds of each part, and the bytes of the version."""
    path, spent = Path(told["path"]), {"learner still": told["still_s"], "publish": told["whole_s"]}
    manifest = read_manifest(path)
    size = sum(one.num_bytes for one in shared_tensors(path.parent))
    with capture_logs() as lines:
        timed(bench, spent, "load", partial(engine.load, path.parent, manifest.version, manifest.tensors))
    if lines or not size:
        raise RuntimeError(f"the engine took files: {lines[0]['reason'] if lines else 'the learner shares nothing'}")
    spent["engine still while loading"] = engine.paused_s
    held = timed(bench, spent, "read back and hash", engine.checksums)
    if wrong := differing(manifest, held):
        raise RuntimeError(f"the engine serves other bytes than were published in {wrong[:3]}")
    hashed = timed(bench, spent, "hashed as by vLLM", partial(hash_as_vllm, path.parent, bench.device))
    if hashed != manifest.tensors:
        raise RuntimeError("vLLM's extension would not find the bytes that were published")
    spent["learner to proved"] = spent["publish"] + spent["load"] + spent["read back and hash"]
    return spent, size


def hash_as_vllm(folder: Path, device: str) -> dict[str, str]:
    """Return name -> XXH3 of a version's tensors, opened by one thread and closed by another, as in vLLM's extension.

    Empty where the tensors lie in files alone. Raises OSError.
    """
    with ThreadPoolExecutor(1) as looking, ThreadPoolExecutor(1) as comparing:
        room = torch.empty(64 * 1024**2, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        opened = looking.submit(OpenVersion, folder, numbered(device)).result()
        found = looking.submit(lambda: {name: one.digest(room) for name, one in opened.tensors.items()}).result()
        comparing.submit(opened.close).result()
    return found


def learn(folder: Path, device: str, shape: str) -> None:
    """Publish a version with its canary for every line; print its path, the seconds until copied, and until whole."""
    config = config_of(shape)
    model = random_model(config, device)
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    on_gpu = device == "cuda"
    shares_on = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    publisher = Publisher(
        folder / "weights", "gpu-hour", dtype=DTYPE, in_memory=True, on_gpu=on_gpu, shares_on=shares_on
    )
    for step, _ in enumerate(sys.stdin):
        change(model)
        canary = make_canary(model, canary_sequences(config.vocab_size), DTYPE)
        if on_gpu:
            torch.cuda.synchronize()
        whole: list[Path] = []
        began_s = time.perf_counter()
        publisher.begin(weight_sources(model), Version(0, step), canary, whole.append)
        still_s = time.perf_counter() - began_s
        publisher.finish()
        told = {"path": str(whole[0]), "still_s": still_s, "whole_s": time.perf_counter() - began_s}
        print(json.dumps(told), flush=True)
    publisher.close()


if __name__ == "__main__":
    learn(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
