"""Memory that leaves a GPU for the turns of others, and comes back."""

import numpy as np
import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import GenerationRequest, Sampling
from mrl.models.device_memory import OffDevice
from mrl.records.version import Version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLACK_BYTES = 1 << 20


def test_a_gpu_is_given_back_and_the_bits_are_the_same() -> None:
    """Again and again, of tensors large enough for locked memory and of small ones."""
    before = torch.cuda.memory_allocated()
    held = [torch.randn(shape, device="cuda") for shape in ((4096, 4099), (1 << 20,), (3, 5))]
    copies, away = [tensor.cpu() for tensor in held], OffDevice()
    for _ in range(3):
        away.leave(held)
        assert torch.cuda.memory_allocated() - before < SLACK_BYTES
        away.come_back()
    assert all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(held, copies, strict=True))


def test_answers_go_on_behind_a_pause_with_the_same_bits(tiny_model, tmp_path) -> None:
    """An engine that pauses after every few tokens, beside one that never does."""
    tiny_model(seed=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    found = []
    for pauses in (False, True):
        engine = EmbeddedEngine(tmp_path, Sampling(1.0, 64, (1,)), device="cuda", max_running=8)
        engine.label(Version(0, 0))
        engine.submit([GenerationRequest("r", np.arange(2, 9, dtype=np.int32), np.arange(8, dtype=np.uint64))])
        answers = {}
        while engine.usage().running or engine.usage().waiting:
            answers |= {one.index: one.generation for one in engine.collect(0.0)}
            if pauses:
                engine.pause()
                engine.resume()
        found.append([(one.token_ids.tolist(), one.logprobs.tolist()) for _, one in sorted(answers.items())])
    assert found[0] == found[1]
    assert len(found[0]) == 8
