"""Held-out accuracy: one answer per held-out prompt, sampled at the policy's own temperature."""

from collections.abc import Callable, Sequence

from mrl.engines.engine import GenerationRequest, generate_all
from mrl.engines.sampling import answer_seeds
from mrl.records.evaluation import EvaluatedAnswer, EvaluationRequest, EvaluationResult, TaskAccuracy
from mrl.records.rollouts import Answer
from mrl.rollout.sampling import Sampler
from mrl.tasks.pool import Prompt

BATCH_PROMPTS = 256
SHOWN_PER_TASK = 3


def evaluate(
    sampler: Sampler, request: EvaluationRequest, stopping: Callable[[], bool] = lambda: False
) -> EvaluationResult | None:
    """Accuracy of the version that the sampler's engine serves; every step uses the same sampling seeds.

    None when `stopping` came true before the end.
    """
    prompts = sampler.pool.held_out
    prompts = prompts[: request.num_prompts] if request.num_prompts else prompts
    answers: list[Answer] = []
    for start in range(0, len(prompts), BATCH_PROMPTS):
        if stopping():
            return None
        answers += _answers(sampler, prompts[start : start + BATCH_PROMPTS])
    tasks = sorted({prompt.task for prompt in prompts})
    rewards = {task: [a.reward for p, a in zip(prompts, answers, strict=True) if p.task == task] for task in tasks}
    return EvaluationResult(
        policy=request.policy,
        version=request.version,
        step=request.version.step,
        accuracy=sum(answer.reward >= 1.0 for answer in answers) / len(answers),
        per_task={
            task: TaskAccuracy(accuracy=sum(r >= 1.0 for r in values) / len(values), prompts=len(values))
            for task, values in rewards.items()
        },
        answers=_shown(prompts, answers, tasks),
    )


def _answers(sampler: Sampler, prompts: Sequence[Prompt]) -> list[Answer]:
    requests = [
        GenerationRequest(
            prompt.prompt_id,
            sampler.prompt_token_ids(prompt.text),
            answer_seeds(sampler.run_seed, sampler.policy, "held-out|" + prompt.prompt_id, 0, 1),
        )
        for prompt in prompts
    ]
    generations = generate_all(sampler.engine, requests)
    return sampler.verified([prompt.prompt_id for prompt in prompts], [rows[0] for rows in generations])


def _shown(prompts: Sequence[Prompt], answers: Sequence[Answer], tasks: list[str]) -> list[EvaluatedAnswer]:
    shown = []
    for task in tasks:
        pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if p.task == task]
        for prompt, answer in pairs[:SHOWN_PER_TASK]:
            text = answer.completion.decode("utf-8", errors="replace")
            shown.append(EvaluatedAnswer(task=task, prompt=prompt.text, completion=text, reward=answer.reward))
    return shown
