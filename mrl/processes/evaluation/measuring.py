"""Measure policies on held-out prompts for `mrl eval`, one policy after another, each in an engine of its own."""

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mrl
from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.errors import EngineLost, RoleFailed
from mrl.metrics.pass_at_k import together
from mrl.metrics.telemetry import Telemetry
from mrl.processes.engines import answers_at_once, build_engine, held_out_decoding
from mrl.processes.evaluation.subjects import EvaluationSubject
from mrl.processes.worker import build_sampler
from mrl.records.evaluation_file import EvaluatedPolicy, EvaluationFile
from mrl.records.evaluation_messages import EvaluationResult
from mrl.records.version import Version
from mrl.rollout.held_out_pass import HeldOutPass
from mrl.tasks.held_out import HeldOutTally, measure_of
from mrl.tasks.pool import Prompt, TaskPool

MAX_LOST = 3
PACKAGES = ("torch", "transformers", "reasoning-gym")


@dataclass(frozen=True)
class HeldOutQuestions:
    """Held-out prompts to answer, and the settings of the evaluation."""

    config: RunConfig
    """Tasks, pool, seed, and the evaluation's own table; its policies are not used."""
    pool: TaskPool
    prompts: Sequence[Prompt]
    on_progress: Callable[[str, int, int], None]
    """Called with a policy's label, the number of its answers so far, and the number of answers wanted."""


def evaluate(subjects: Sequence[EvaluationSubject], asked: HeldOutQuestions, scratch: Path) -> EvaluationFile:
    """Have all subjects answer and return the results; `scratch` holds logs of servers meanwhile.

    Raises UserError, CheckpointError, and RoleFailed where an engine is lost again and again.
    """
    policies = {subject.label: _evaluate_one(subject, asked, scratch) for subject in subjects}
    table, config = asked.config.evaluation, asked.config
    tallies = {label: policy.result.prompts for label, policy in policies.items()}
    joint = {str(k): together(tallies, k) for k in sorted(set(table.k))} if len(policies) > 1 else {}
    tasks = {prompt.task for prompt in asked.prompts}
    return EvaluationFile(
        made_unix_s=time.time(),
        packages={"mrl": mrl.__version__, **{name: importlib.metadata.version(name) for name in PACKAGES}},
        seed=config.run.seed,
        samples=table.samples,
        k=sorted(set(table.k)),
        success_reward=config.run.success_reward,
        tasks={name: task.model_dump(mode="json") for name, task in config.tasks.items() if name in tasks},
        pool_seed=config.pool.seed,
        prompt_ids=[prompt.prompt_id for prompt in asked.prompts],
        policies=policies,
        together={k: found for k, found in joint.items() if found is not None},
    )


def _evaluate_one(subject: EvaluationSubject, asked: HeldOutQuestions, scratch: Path) -> EvaluatedPolicy:
    with subject.model_folder() as model:
        # As a frozen policy, whose rows need not fit into a learner's pass.
        table = subject.table.model_copy(update={"model": str(model), "frozen": True, "make": None})
        config = asked.config.model_copy(update={"policies": {subject.label: table}})
        result = _answers(subject, config, asked, RunFolder(scratch))
    rollout, decoding = table.rollout, held_out_decoding(config, subject.label)
    return EvaluatedPolicy(
        subject=subject.words,
        model=subject.table.source or subject.table.model,
        engine=rollout.engine,
        dtype=rollout.engine_dtype,
        temperature=rollout.temperature if decoding is None else decoding.temperature,
        top_p=config.evaluation.top_p,
        max_new_tokens=rollout.max_new_tokens,
        prompt=table.prompt.model_dump(mode="json", exclude_defaults=True),
        result=result,
    )


def _answers(
    subject: EvaluationSubject, config: RunConfig, asked: HeldOutQuestions, folder: RunFolder
) -> EvaluationResult:
    version, label = Version(0, subject.step), subject.label
    with ExitStack() as closing:
        engine = partial(build_engine, config, label, folder=folder, role=f"eval/{label}")
        sampler, _ = build_sampler(config, label, asked.pool, engine)
        closing.callback(sampler.engine.close)
        sampler.engine.label(version)
        book = HeldOutTally(label, version, asked.prompts, began_s=time.monotonic(), measure=measure_of(config))
        at_work = HeldOutPass(sampler, Telemetry("eval", label, lambda _: None), book)
        total, most, lost = book.num_missing, answers_at_once(config, label), 0
        while not book.is_over:
            try:
                at_work.go_on(most - at_work.in_flight)
            except EngineLost as error:
                lost += 1
                if lost > MAX_LOST:
                    raise RoleFailed(f"the engine of {label} was lost {lost} times: {error}") from error
                sampler.engine.restart()
                sampler.engine.label(version)
            asked.on_progress(label, total - book.num_missing, total)
        result = book.result(time.monotonic())
    if result is None:
        raise RoleFailed(f"{label} answered no prompt: {book.failures()}")
    return result


def engine_table(table: PolicyTable, *, engine: str, device: str, max_new_tokens: int) -> PolicyTable:
    """Return the policy's table with another engine, device or answer length; "" or 0 leaves a setting as it is.

    A server is always started anew; one at a `url`, which a run may use, is never asked.
    """
    server = table.rollout.server.model_copy(update={"url": ""})
    changes = {"engine": engine, "max_new_tokens": max_new_tokens}
    rollout = table.rollout.model_copy(update={"server": server, **{k: v for k, v in changes.items() if v}})
    return table.model_copy(update={"rollout": rollout, "device": device or table.device})
