"""Weights from a learner's memory into an engine on a GPU: by gloo, and by NCCL where there are two GPUs."""

import pytest
import torch

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.models.parameters import named_weights
from mrl.models.tensor_broadcast import IncomingTensors
from mrl.records.rollouts import WeightsNotice, WeightsRequest
from mrl.records.version import Version
from mrl.rollout.weight_updates import prove
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_engine_on_a_gpu_serves_what_was_broadcast(tiny_model, tmp_path, backend):
    """Two versions: the bytes are those of the manifest, and the canary fits."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each member")
    engine_device, device = ("cuda:1", "cuda:0") if backend == "nccl" else ("cuda:0", "cpu")
    tiny_model(seed=2).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    learner = tiny_model(seed=1).to("cuda:0")
    engine = EmbeddedEngine(tmp_path / "model", Sampling(1.0, 4, (1,)), device=engine_device, max_running=4)
    publisher = BroadcastPublisher(Publisher(tmp_path / "weights", "a"), host="127.0.0.1", device=device)

    for step in (1, 2):
        version = Version(0, step)
        with torch.no_grad():
            for tensor in named_weights(learner).values():
                tensor.mul_(1.0 + 1e-3)
        canary = make_canary(learner, canary_sequences(64))
        path = publisher.publish_weights(named_weights(learner).items(), version, canary)
        seats, manifest = engine.broadcast_seats(), read_manifest(path)
        asked = WeightsRequest(worker="w", version=version, attempt=step, num_ranks=1, gpu=seats.gpu, nccl=seats.nccl)
        publisher.ask(b"", asked)
        route = _answer(publisher, WeightsNotice(version=version, manifest_path=str(path)))
        assert route.meeting is not None
        assert route.meeting.backend == backend
        engine.receive(IncomingTensors(route.meeting, manifest.broadcast, manifest.tensors), version)

        assert engine.checksums() == manifest.tensors
        assert prove(engine, manifest).gap.max_nats < 1e-3
    publisher.close()


def _answer(publisher: BroadcastPublisher, notice: WeightsNotice):
    """What a worker is told, once the broadcast before has ended."""
    while not (answers := publisher.answers(notice, num_workers=1)):
        continue
    return answers[0][1]
