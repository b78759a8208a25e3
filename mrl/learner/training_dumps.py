"""Files for people to read, as JSON lines: the answers of every step, and batches whose update was skipped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from mrl.files import replace_file
from mrl.learner.batches import PreparedStep
from mrl.learner.step_order import StepOrder
from mrl.metrics.rollout_files import Rollout, RolloutFiles
from mrl.metrics.telemetry import MAX_SAMPLE_CHARS, Telemetry
from mrl.records.codec import unpack_array
from mrl.records.readable_turns import readable_turns
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.sharing.peer_episodes import EpisodeRenderer
from mrl.sharing.regime import Rescue
from mrl.tasks.pool import TaskPool

KEPT = 3
"""Newest skipped batches of a policy that are kept."""
MAX_TURNS_CHARS = 256 * 1024
"""Limit of the text of an episode's opening, and of its turns."""

log = structlog.get_logger()


def dump_batch(folder: Path, policy: str, step: int, order: StepOrder) -> Path:
    """Write the rows of step `step`, whose update was skipped; return the file. Values that are no numbers are null.

    Raises OSError.
    """
    path = folder / f"skipped-{policy}-step_{step}.jsonl"
    lines = [
        msgspec.json.encode(
            {
                "prompt_id": row.prompt_id,
                "source": row.source,
                "component": row.component,
                "denominator": order.denominators[row.component],
                "prompt_token_ids": row.prompt_token_ids.tolist(),
                "answer_token_ids": row.answer_token_ids.tolist(),
                "is_trained": None if row.is_trained is None else row.is_trained.tolist(),
                "row_starts": None if row.row_starts is None else row.row_starts.tolist(),
                "advantages": row.advantages.tolist(),
                "weights": row.weights.tolist(),
                "behaviour_logprobs": _listed(row.behaviour_logprobs),
                "teacher_logprobs": _listed(row.teacher_logprobs),
                "teacher_unit_ids": None if row.teacher_units is None else row.teacher_units.token_ids.tolist(),
                "teacher_unit_logprobs": None if row.teacher_units is None else row.teacher_units.logprobs.tolist(),
            }
        )
        for row in order.examples
    ]
    replace_file(path, b"\n".join(lines) + b"\n")
    kept = sorted(folder.glob(f"skipped-{policy}-step_*.jsonl"), key=_step_of)
    for old in kept[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def _listed(values_T: npt.NDArray | None) -> list[float] | None:
    return None if values_T is None else values_T.tolist()


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def sample_writer(
    pool: TaskPool, telemetry: Telemetry, rollouts: Path, max_mib: int, renderer: EpisodeRenderer | None = None
) -> Callable[[int, PreparedStep], None]:
    """Return a function to call after every step: it sends samples to telemetry, and writes all answers of the step.

    The folder `rollouts` keeps at most `max_mib` MiB of answers, and none with 0. On a full disk the answers of the
    step are lost, with a warning. `renderer` reads the openings of episodes.
    """
    policy, told = telemetry.policy, _Told(pool, renderer)
    files = RolloutFiles(rollouts, policy, max_mib * 1024 * 1024) if max_mib else None

    def write(step: int, prepared: PreparedStep) -> None:
        group = prepared.groups[step % len(prepared.groups)]
        answer = group.answers[0]
        shown = told.answer(group, answer, told.opening(group), MAX_SAMPLE_CHARS)
        telemetry.sample(step, kind="rollout", **shown, rewards=answer.rewards, failure=answer.failure)
        for rescue in prepared.rescued[:1]:
            telemetry.sample(step, kind="rescue", **told.rescue(rescue, MAX_SAMPLE_CHARS), source=rescue.source)
        if files:
            try:
                files.write(step, [*_own_rows(told, policy, step, prepared), *_rescues(told, policy, step, prepared)])
            except OSError as error:
                log.warning("answers of a step not written", step=step, why=error.strerror)

    return write


@dataclass(frozen=True)
class _Told:
    """Readable fields of answers: prompt, text, reward, and the turns of an episode."""

    pool: TaskPool
    renderer: EpisodeRenderer | None

    def answer(self, group: ScoredGroup, answer: Answer, opening: str, max_chars: int) -> dict[str, Any]:
        shown = self._shown(group.prompt_id, answer)
        if answer.segments:
            shown |= {"opening": opening[:max_chars], "turns": readable_turns(answer.segments, max_chars)}
        return shown

    def opening(self, group: ScoredGroup) -> str:
        """Return the opening of a group's episodes, which is the same for all of them; "" for answers of one turn."""
        if not any(answer.segments for answer in group.answers):
            return ""
        return self._read(unpack_array(group.prompt_token_ids, "i4").tolist(), MAX_TURNS_CHARS)

    def rescue(self, rescue: Rescue, max_chars: int) -> dict[str, Any]:
        shown = self._shown(rescue.prompt_id, rescue)
        if rescue.turns:
            opening = self._read(rescue.prompt_token_ids, max_chars)
            shown |= {"opening": opening, "turns": readable_turns(rescue.turns, max_chars)}
        return shown

    def _shown(self, prompt_id: str, shown: Answer | Rescue) -> dict[str, Any]:
        prompt, text = self.pool.prompt(prompt_id), shown.completion.decode("utf-8", errors="replace")
        return {"task": prompt.task, "prompt": prompt.text, "completion": text, "reward": shown.reward}

    def _read(self, token_ids: Sequence[int], max_chars: int) -> str:
        return self.renderer.read(token_ids)[:max_chars] if self.renderer else ""


def _own_rows(told: _Told, policy: str, step: int, prepared: PreparedStep) -> Iterator[Rollout]:
    for group in prepared.groups:
        opening = told.opening(group)
        for answer in group.answers:
            logprobs_S = np.frombuffer(answer.logprobs, np.float32)
            steps = [span.version.step for span in answer.versions]
            yield Rollout(
                policy=policy,
                step=step,
                kind="rollout",
                prompt_id=group.prompt_id,
                **told.answer(group, answer, opening, MAX_TURNS_CHARS),
                rewards=answer.rewards,
                failure=answer.failure,
                source=policy,
                finish_reason=answer.ending or answer.finish_reason.value,
                tokens=len(logprobs_S),
                logprob_mean=float(logprobs_S.mean()) if len(logprobs_S) else None,
                oldest_step=min(steps, default=None),
                newest_step=max(steps, default=None),
            )


def _rescues(told: _Told, policy: str, step: int, prepared: PreparedStep) -> Iterator[Rollout]:
    for one in prepared.rescued:
        shown = told.rescue(one, MAX_TURNS_CHARS)
        yield Rollout(policy=policy, step=step, kind="rescue", prompt_id=one.prompt_id, **shown, source=one.source)
