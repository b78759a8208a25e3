"""The evaluator: held-out accuracy of published versions, and once of every frozen policy.

Owns: nothing.
Speaks: results as files and metrics.
Waits for: requests in `evaluation/queue/`, without a bound of its own: an idle evaluator says so and costs nothing.
Unblocked by: a learner that drops a request.
If it dies: the request is still in the queue, and the restarted evaluator takes it.
"""

import threading
from contextlib import ExitStack
from pathlib import Path

import msgspec
import structlog

from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.errors import EngineLost, WeightsError
from mrl.files import replace_file
from mrl.metrics.telemetry import Telemetry
from mrl.records.evaluation import EvaluationRequest, EvaluationResult
from mrl.records.version import Version
from mrl.roles import wiring
from mrl.roles.engines import build_embedded
from mrl.roles.worker import build_sampler
from mrl.rollout.evaluate import evaluate
from mrl.rollout.sampling import Sampler
from mrl.rollout.updates import install
from mrl.weights.publish import remove

POLL_S = 0.3

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Answer evaluation requests until told to stop."""
    return wiring.run_role(run_folder, "evaluator", "", _serve)


def _serve(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
    stop = wiring.stop_event()
    telemetry = wiring.connect_telemetry(folder, "evaluator", "", closing)
    samplers: dict[str, Sampler] = {}
    queue = folder.evaluation / "queue"
    for policy in [name for name in config.policies if name not in config.learning]:
        _evaluate_frozen(config, policy, folder, telemetry, stop)
    while not stop.is_set():
        requests = sorted(queue.glob("*.json"), key=lambda path: path.stat().st_mtime)
        if not requests:
            _await_requests(telemetry, stop)
            continue
        request = msgspec.json.decode(requests[0].read_bytes(), type=EvaluationRequest)
        if request.policy not in samplers:
            samplers[request.policy] = _sampler(config, request.policy)
            closing.callback(samplers[request.policy].pool.close)
        telemetry.doing("evaluating", f"{request.policy} at step {request.version.step}")
        if _answer(request, samplers[request.policy], folder, telemetry, stop):
            _remove(requests[0], Path(request.manifest_path))
    return 0


def _sampler(config: RunConfig, policy: str) -> Sampler:
    """Transformers evaluates, whatever engine the workers have."""
    return build_sampler(config, policy, lambda receiver: build_embedded(config, policy, receiver))[0]


def _evaluate_frozen(
    config: RunConfig, policy: str, folder: RunFolder, telemetry: Telemetry, stop: threading.Event
) -> None:
    """Its weights are those of its folder and never change, so neither does the result of an earlier attempt."""
    request = EvaluationRequest(policy=policy, version=Version(0, 0), manifest_path="", num_prompts=0)
    if (folder.evaluation / request.file_name).exists():
        return
    telemetry.doing("evaluating", policy)
    sampler = _sampler(config, policy)
    sampler.engine.label(request.version)
    try:
        _evaluate(request, sampler, folder, telemetry, stop)
    finally:
        sampler.pool.close()


def _await_requests(telemetry: Telemetry, stop: threading.Event) -> None:
    telemetry.doing("idle")
    stop.wait(POLL_S)


def _answer(
    request: EvaluationRequest, sampler: Sampler, folder: RunFolder, telemetry: Telemetry, stop: threading.Event
) -> bool:
    """Whether the request is settled; one that was interrupted stays in the queue."""
    try:
        install(sampler.engine, Path(request.manifest_path), request.version)
    except (WeightsError, EngineLost) as error:
        log.error("evaluation refused", policy=request.policy, step=request.version.step, reason=str(error))
        sampler.engine.restart()
        return True
    return _evaluate(request, sampler, folder, telemetry, stop)


def _evaluate(
    request: EvaluationRequest, sampler: Sampler, folder: RunFolder, telemetry: Telemetry, stop: threading.Event
) -> bool:
    """Whether there is a result of what the sampler's engine serves; there is none when the role was told to stop."""
    result = evaluate(sampler, request, stop.is_set)
    if result is None:
        return False
    replace_file(folder.evaluation / request.file_name, msgspec.json.encode(result))
    _tell(result, telemetry)
    return True


def _tell(result: EvaluationResult, telemetry: Telemetry) -> None:
    values = {"eval/accuracy": result.accuracy}
    values |= {f"eval/accuracy/{task}": found.accuracy for task, found in result.per_task.items()}
    telemetry.metrics(result.step, values, policy=result.policy)
    for answer in result.answers:
        telemetry.sample(
            result.step,
            kind="evaluation",
            task=answer.task,
            prompt=answer.prompt,
            completion=answer.completion,
            reward=answer.reward,
            policy=result.policy,
        )


def _remove(request: Path, manifest: Path) -> None:
    request.unlink(missing_ok=True)
    remove(manifest)
