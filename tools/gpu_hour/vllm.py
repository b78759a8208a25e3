"""A vLLM server beside a learner's model on one GPU: start, sampling, new weights, restart.

The server comes from its own environment (`mrl engine-env vllm`); where that is not there, one line says so.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from gpu_hour.bench import Bench, SkippedError
from gpu_hour.shapes import config_of, random_model
from mrl.engines.engine import GenerationRequest, Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.errors import EngineError
from mrl.models.number_formats import NumberFormat
from mrl.models.parameters import named_weights
from mrl.processes.engines import DIALECTS
from mrl.records.version import Version
from mrl.rollout.weight_updates import install
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.publish import Publisher

START_S = 400.0
BESIDE = ("--gpu-memory-utilization", "0.35")
"""Options of the server: its share of the GPU's memory; the rest is the learner's."""


def vllm_parts() -> dict[str, Callable[[Bench], None]]:
    """The stage's only part: each of its steps needs the one before."""
    return {"server": measure_server}


def measure_server(bench: Bench) -> None:
    """Measure a server's start, sampling, update and restart.

    Raises SkippedError without an environment, and the engine's error for weights that are not served.
    """
    try:
        python = engine_python("vllm", device=bench.device)
    except EngineError as error:
        raise SkippedError(" ".join(str(error).split())) from None
    os.environ.pop("PYTORCH_ALLOC_CONF", None)  # good for the learner, and not known to be for the server
    config = config_of(bench.of("0.6B", "tiny"), max_position_embeddings=4096)
    model = random_model(config, bench.device)
    folder = bench.scratch / "model"
    model.save_pretrained(folder)
    tokens, groups, group_size = bench.of(512, 16), bench.of(32, 2), bench.of(8, 2)
    dtype: NumberFormat = bench.of("bfloat16", "float32")
    launch = Launch(
        python=python,
        model_folder=folder,
        host="127.0.0.1",
        port=0,
        device=bench.device,
        dtype=dtype,
        threads=1,
        max_running=groups * group_size,
        max_context_tokens=bench.of(2048, 128),
        seed=0,
        options=bench.of(BESIDE, ()),
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=tokens, eos_ids=(1,))
    began_s = time.monotonic()
    log = bench.folder / "vllm-server.log"
    bounds = ServerTimeouts(start_s=min(START_S, max(1.0, bench.left_s)))
    engine = ServerEngine(DIALECTS["vllm"](), sampling, launch=launch, log=log, bounds=bounds)
    try:
        bench.tell("start", time.monotonic() - began_s, "s")
        engine.label(Version(0, 0))
        _sample(bench, engine, groups, group_size, config.vocab_size)
        _update(bench, engine, model, folder, dtype)
        began_s = time.monotonic()
        engine.restart()
        bench.tell("restart", time.monotonic() - began_s, "s")
    finally:
        engine.close()


def _sample(bench: Bench, engine: ServerEngine, groups: int, group_size: int, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    for name in ("warm-up", "sampling"):
        requests = [
            GenerationRequest(
                f"{name}-{number}",
                rng.integers(2, vocab_size, bench.of(256, 8)).astype(np.int32),
                rng.integers(0, 2**63, group_size, dtype=np.uint64),
            )
            for number in range(groups)
        ]
        began_s = time.monotonic()
        answers = generate_all(engine, requests)
        spent_s = time.monotonic() - began_s
        count = sum(answer.token_ids.size for group in answers for answer in group)
        bench.tell(name, count / spent_s, "tokens/s", tokens=count, answers_at_once=groups * group_size)


def _update(bench: Bench, engine: ServerEngine, model: PreTrainedModel, folder: Path, dtype: NumberFormat) -> None:
    """Publish weights in the memory of this process, as in a run of one host, and install them."""
    began_s = time.monotonic()
    canary = make_canary(model, canary_sequences(model.config.vocab_size), dtype)
    publisher = Publisher(
        bench.scratch / "weights",
        "gpu-hour",
        model_folder=folder,
        dtype=dtype,
        in_memory=True,
        on_gpu=bench.device == "cuda",
    )
    path = publisher.publish_weights(named_weights(model).items(), Version(0, 1), canary)
    bench.tell("publish", time.monotonic() - began_s, "s")
    installed = install(engine, path, Version(0, 1))
    publisher.close()
    bench.tell("install and prove", installed.seconds, "s")
    bench.tell("canary", installed.gap.mean_nats, "nats", max_nats=installed.gap.max_nats)
    bench.tell("bytes compared", installed.compared_share, "share")
