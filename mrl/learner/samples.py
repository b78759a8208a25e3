"""What a learner shows of every step: an answer that it trained on, and one that rescued a group."""

from collections.abc import Callable

from mrl.learner.batches import PreparedStep
from mrl.metrics.telemetry import Telemetry
from mrl.tasks.pool import TaskPool


def sample_writer(pool: TaskPool, telemetry: Telemetry) -> Callable[[int, PreparedStep], None]:
    """What a learner calls behind every step, to write samples of it."""

    def write(step: int, prepared: PreparedStep) -> None:
        group = prepared.groups[step % len(prepared.groups)]
        answer = group.answers[0]
        text = answer.completion.decode("utf-8", errors="replace")
        prompt = pool.prompt(group.prompt_id)
        telemetry.sample(
            step, kind="rollout", task=prompt.task, prompt=prompt.text, completion=text, reward=answer.reward
        )
        for rescue in prepared.rescued[:1]:
            prompt = pool.prompt(rescue.prompt_id)
            text = rescue.completion.decode("utf-8", errors="replace")
            telemetry.sample(
                step,
                kind="rescue",
                task=prompt.task,
                prompt=prompt.text,
                completion=text,
                reward=1.0,
                source=rescue.source,
            )

    return write
