"""Weights that an engine copies from its learner's GPU, which is another process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_hour import shared_weights
from structlog.testing import capture_logs

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.models.memory_file import shared_tensors
from mrl.models.tensor_broadcast import gpu_id
from mrl.weights.manifest import read_manifest
from mrl.weights.read_lock import read_lock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_an_engine_serves_what_lies_on_its_learners_gpu(tmp_path, device):
    """More versions than there is memory for, so that it is written over: no file is read, every byte is right."""
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("one GPU alone")
    words = [sys.executable, "-m", "gpu_hour.shared_weights", str(tmp_path), "cuda", "tiny"]
    tools = Path(shared_weights.__file__).parents[1]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tools) as learner:
        engine = None
        for _ in range(5):
            learner.stdin.write("\n")
            learner.stdin.flush()
            path = Path(json.loads(learner.stdout.readline())["path"])
            engine = engine or EmbeddedEngine(
                tmp_path / "model", Sampling(1.0, 8, (1,)), device=device, max_running=2, dtype="bfloat16"
            )
            manifest = read_manifest(path)
            assert [one.gpu for one in shared_tensors(path.parent)] == [gpu_id(torch.device("cuda:0"))]
            with read_lock(path.parent), capture_logs() as lines:
                engine.load(path.parent, manifest.version, manifest.tensors)
                assert engine.checksums() == manifest.tensors
                assert shared_weights.hash_as_vllm(path.parent, device) == manifest.tensors
            assert lines == []
        learner.stdin.close()
    assert learner.returncode == 0
