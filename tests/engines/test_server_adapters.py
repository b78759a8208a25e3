"""Adapters alone in a real vLLM: each version takes the place of the last, and wrong ones are found out.

The extension is that of GPUs, which tells of adapters as that of CPUs does.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.policy_tables import LoraTable
from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import AdapterShape, Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.errors import WeightsError, WeightsUnproved
from mrl.models.skeleton import adapted_layers, config_of_folder
from mrl.rollout.weight_updates import Route, install, prove
from mrl.weights.manifest import read_manifest
from tests.support.engine_rig import EOS_IDS, ReloadingVLLM, Rig, Weights
from tests.support.family_rig import ADAPTER_FILE, Learner, Learnt, make_family

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
TOLERANCE_NATS = 1e-4
LORA: dict[str, int] = {"rank": 3, "alpha": 7}
FIRST = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Learnt]:
    """The first one's adapters do nothing yet."""
    root = tmp_path_factory.mktemp("adapters")
    learner = Learner(root / "published", make_family(root / "start", "qwen3"), lr=1e-2, lora=LORA)
    return [learner.learn(steps) for steps in (0, 2, 2)]


@pytest.fixture(scope="module")
def rig(versions, tmp_path_factory) -> Iterator[Rig]:
    """One server, which every test gives the adapters that it needs."""
    python = engine_python("vllm", device="cpu")
    start = versions[0].start
    adapters = AdapterShape(LORA["rank"], adapted_layers(config_of_folder(start), LoraTable(**LORA)))
    folder = tmp_path_factory.mktemp("vllm")
    backend = ReloadingVLLM(folder)
    launch = Launch(python, start, "127.0.0.1", 0, "cpu", "float32", 1, 32, 512, 0, backend.options, adapters=adapters)
    sampling, bounds = Sampling(0.7, 160, EOS_IDS[:1]), ServerTimeouts(start_s=300.0)
    engine = ServerEngine(backend, sampling, launch=launch, log=folder / "server.log", bounds=bounds)
    made = Rig(engine, 0.7)
    made.served = {one.version: Weights(one.manifest.parent, one.model) for one in versions}
    yield made
    engine.close()


def check_samples(rig: Rig) -> None:
    """Each token has the log-probability of the adapters that are served."""
    request = rig.ask(answers=4)
    rig.engine.submit([request])
    for one in rig.collect(4):
        assert {span.version for span in one.generation.versions} == {rig.engine.version}
        expected = rig.expected(request, one, keeps_cache=False)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)


def test_versions_take_each_others_place(rig, versions):
    """An older one again, too; every byte is compared."""
    for learnt in (*versions, versions[1]):
        installed = install(rig.engine, learnt.manifest, learnt.version)

        assert installed.route is Route.ADAPTERS
        assert installed.gap.max_nats <= TOLERANCE_NATS
        assert installed.compared_share == 1.0
        check_samples(rig)


def test_an_update_in_mid_answer_gives_spans_that_are_right(rig, versions):
    """Each span has the log-probabilities of its own adapters, from a cache that no others have written."""
    for _ in range(5):  # on a busy machine answers may be over before the update is ready
        if any(len(one.generation.versions) == 2 for one in _over_an_update(rig, versions)):
            return
    pytest.fail("the update landed in no answer")


def _over_an_update(rig, versions):
    """24 answers, all of them right, with new adapters as soon as some of them are under way."""
    install(rig.engine, versions[1].manifest, versions[1].version)
    requests = [rig.ask(answers=8) for _ in range(3)]
    start = rig.engine.usage().generated_tokens
    rig.engine.submit(requests)
    finished = []
    update = threading.Thread(target=install, args=(rig.engine, versions[2].manifest, versions[2].version))
    while not update.ident or update.is_alive():
        finished += rig.engine.collect(0.05)
        if not update.ident and (finished or rig.engine.usage().generated_tokens > start + 100):
            update.start()
    update.join()
    finished += rig.collect(24 - len(finished))

    assert rig.engine.version == versions[2].version
    asked = {request.request_id: request for request in requests}
    for one in finished:
        expected = rig.expected(asked[one.request_id], one, keeps_cache=False)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)
    return finished


def stale(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """All are of the version before."""
    tensors.update(before)


def swapped(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """Two have one shape, so that nothing else would complain."""
    first, second = FIRST.format(0), FIRST.format(1)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def half_applied(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """The second layer is that of the version before."""
    tensors.update({name: tensor for name, tensor in before.items() if ".layers.1." in name})


@pytest.mark.parametrize("fault", [stale, swapped, half_applied])
def test_a_server_with_others_than_were_published_is_found_out(
    rig, versions, tmp_path, monkeypatch, fault: Callable[..., None]
):
    """What it really computes with is planted; the proof sees it, and files that changed are refused before."""
    learnt = versions[2]
    before = load_file(versions[1].manifest.parent / ADAPTER_FILE)
    planted = learnt.planted(tmp_path / "planted", lambda tensors: fault(tensors, before))
    install(rig.engine, versions[1].manifest, versions[1].version)

    with pytest.raises(WeightsError, match="checksum"):
        install(rig.engine, planted.manifest, planted.version)
    assert rig.engine.version == versions[1].version
    rig.engine.load_adapters(planted.manifest.parent, planted.version)
    with pytest.raises(WeightsUnproved, match="weights differ from version"):
        prove(rig.engine, read_manifest(learnt.manifest))
    monkeypatch.setattr(rig.engine, "checksums", lambda: None)
    with pytest.raises(WeightsUnproved, match="canary"):
        prove(rig.engine, read_manifest(learnt.manifest))


def test_it_is_the_numbers_in_the_kernels_that_are_compared(rig, versions):
    """A server that has the files of a version and computes with the one before."""
    install(rig.engine, versions[1].manifest, versions[1].version)
    backend = rig.engine._backend
    name, served = backend._adapters
    backend._adapters = name, versions[2].manifest.parent
    try:
        with pytest.raises(WeightsUnproved, match=r"weights differ from version.*lora_A"):
            prove(rig.engine, read_manifest(versions[2].manifest))
    finally:
        backend._adapters = name, served


def test_a_server_that_starts_anew_takes_the_newest(rig, versions):
    """It has the weights of the policy's folder then, and no adapters."""
    install(rig.engine, versions[1].manifest, versions[1].version)
    rig.engine.restart()
    assert rig.engine.version is None

    installed = install(rig.engine, versions[2].manifest, versions[2].version)

    assert installed.gap.max_nats <= TOLERANCE_NATS
    check_samples(rig)
