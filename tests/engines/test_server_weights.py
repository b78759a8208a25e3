"""Weights of real servers in 16 bits: proved from the start, byte by byte; and an update in which one hangs.

The learner publishes float32. A server that computes in bfloat16 holds what rounding makes of it, and says so.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.http import Http
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.errors import EngineLost, WeightsUnproved
from mrl.records.version import Version
from mrl.rollout.weight_updates import prove
from mrl.weights.canary import canary_sequences
from mrl.weights.frozen_manifest import describe_folder
from mrl.weights.manifest import Manifest
from tests.support.engine_rig import EOS_IDS, VOCAB_SIZE, Weights, make_weights

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
LOAD_S = 10.0
TEXTS = canary_sequences(VOCAB_SIZE)
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def hanging(backend: type[ServerBackend]) -> type[ServerBackend]:
    """The same, but all processes of the server are stopped when it is about to load, once `stop` is set."""

    class Hanging(backend):  # type: ignore[misc, valid-type]
        stop: Callable[[], object] | None = None

        async def load(self, http: Http, folder: Path, label: str) -> None:
            if self.stop is not None:
                self.stop()
            await super().load(http, folder, label)

    return Hanging


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Weights:
    """What the server is started on."""
    return make_weights(tmp_path_factory.mktemp("own") / "a", seed=1, family="llama", tied=False)


@pytest.fixture(scope="module", params=[VLLM, SGLang], ids=lambda backend: backend.name)
def engine(request, own, tmp_path_factory) -> Iterator[ServerEngine]:
    """In bfloat16."""
    backend = hanging(request.param)()
    launch = Launch(
        engine_python(backend.name, device="cpu"), own.folder, "127.0.0.1", 0, "cpu", "bfloat16", 1, 8, 64, 0
    )
    log = tmp_path_factory.mktemp(backend.name) / "server.log"
    bounds = ServerTimeouts(start_s=400.0, load_s=LOAD_S)
    made = ServerEngine(backend, Sampling(1.0, 8, EOS_IDS), launch=launch, log=log, bounds=bounds)
    yield made
    made.close()


@pytest.fixture
def changed(own, tmp_path) -> Callable[[float], Weights]:
    """The server's own weights, one element of them off by something."""

    def make(off: float) -> Weights:
        tensors = load_file(own.folder / "model.safetensors")
        tensors[UP_PROJ][3, 5] = torch.tensor(0.25) + off
        folder = tmp_path / str(off)
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((own.folder / name).read_bytes())
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return replace(own, folder=folder)

    return make


def described(weights: Weights) -> Manifest:
    return describe_folder(weights.folder, "teacher", Version(0, 0), TEXTS, "bfloat16")


def test_a_server_proves_what_it_was_started_on(engine, own):
    """Every byte of it, before anything was loaded."""
    engine.label(Version(0, 0))

    proof = prove(engine, described(own))

    assert proof.compared_share == 1.0
    assert not proof.gap.problem
    assert proof.gap.mean_nats > 1e-3, "in float32 it would be less"


def test_a_server_of_other_weights_is_found_out(engine, own, tmp_path, monkeypatch):
    """By its bytes, and by the canary where nobody can tell them."""
    engine.label(Version(0, 0))
    other = make_weights(tmp_path / "b", seed=2, family="llama", tied=False)

    with pytest.raises(WeightsUnproved, match="weights differ from version"):
        prove(engine, described(other))
    monkeypatch.setattr(engine, "checksums", lambda: None)
    with pytest.raises(WeightsUnproved, match="canary"):
        prove(engine, described(other))


def test_one_element_that_rounds_to_another_number_is_named(engine, changed):
    """And one that rounds to the same is the same to the server."""
    stays, steps = changed(0.0), changed(2.0**-9)
    engine.load(stays.folder, Version(0, 1), stays.digests())

    assert prove(engine, described(stays)).compared_share == 1.0
    held = engine.checksums()
    wanted = steps.digests()
    assert {name for name in wanted if held[name] != wanted[name]} == {UP_PROJ}
    with pytest.raises(WeightsUnproved, match=rf"weights differ from version 0\.0 in .*{UP_PROJ}"):
        prove(engine, described(steps))


@pytest.mark.parametrize(
    "engine", [pytest.param(VLLM, id="vllm", marks=pytest.mark.slow), pytest.param(SGLang, id="sglang")], indirect=True
)
def test_a_server_that_hangs_in_an_update_is_given_up_at_the_bound(engine, own, changed):
    """All of its processes are stopped as it is about to load; its successor proves what it was started on."""
    root = psutil.Process(engine._process.pid)
    before = [root, *root.children(recursive=True)]
    backend: Any = engine._backend
    backend.stop = lambda: [process.suspend() for process in before]
    fresh = changed(0.5)
    began_s = time.monotonic()

    with pytest.raises(EngineLost, match=f"no answer within {LOAD_S:g} s"):
        engine.load(fresh.folder, Version(0, 2), fresh.digests())

    assert time.monotonic() - began_s >= LOAD_S
    backend.stop = None
    engine.restart()
    assert not psutil.wait_procs(before, timeout=120)[1], "the stopped server left a process"
    engine.label(Version(0, 0))
    assert prove(engine, described(own)).compared_share == 1.0
    engine.load(fresh.folder, Version(0, 2), fresh.digests())
    assert prove(engine, described(fresh)).compared_share == 1.0
