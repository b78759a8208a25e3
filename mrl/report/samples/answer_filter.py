"""Selection of a run's answers by policy, step, task, outcome and words."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.nearest_key import nearest
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from mrl.metrics.jsonl import read_samples
from mrl.metrics.rollout_files import policy_of, read_rollouts, rollout_files, step_of

HELD_OUT = "evaluation"
"""Kind of the samples that are answers to held-out prompts."""


@dataclass(frozen=True, slots=True)
class AnswerFilter:
    """Conditions on answers; an empty field, or None, is no condition."""

    policy: str = ""
    step: int | None = None
    task: str = ""
    failed: bool = False
    """Only answers that are no success, so none of a peer: a rescue is a success."""
    rescued: bool = False
    """Only answers of peers, trained on where the own group failed as a whole."""
    words: str = ""
    """Text that has to be in the prompt or the answer, in upper or lower case."""
    held_out: bool = False
    """Answers to held-out prompts, of which the run keeps some, in place of answers that were trained on."""

    def covers(self, row: dict[str, Any], success_reward: float) -> bool:
        """Whether a row of a rollout file meets the conditions on task, outcome and words."""
        reward = row.get("reward")
        succeeded = isinstance(reward, int | float) and reward >= success_reward
        text = "\n".join(str(row.get(part, "")) for part in ("prompt", "opening", "completion")).casefold()
        return (
            (not self.task or row.get("task") == self.task)
            and (not self.rescued or row.get("kind") == "rescue")
            and (not self.failed or not succeeded)
            and self.words.casefold() in text
        )


def select(folder: RunFolder, config: RunConfig, wanted: AnswerFilter) -> Iterator[dict[str, Any]]:
    """Return an iterator over the wanted answers, the newest step first; each file is read only when it is its turn.

    Raises RunFolderError where the run kept no answers, or knows no such policy, task or step.
    """
    _check_name(folder, "policy", wanted.policy, config.learning)
    _check_name(folder, "task", wanted.task, config.tasks)
    if wanted.held_out:
        return (row for row in _held_out(folder, wanted) if wanted.covers(row, config.run.success_reward))
    files = _files(folder, config, wanted)
    return (row for path in files for row in read_rollouts(path) if wanted.covers(row, config.run.success_reward))


def _files(folder: RunFolder, config: RunConfig, wanted: AnswerFilter) -> list[Path]:
    files = [path for path in rollout_files(folder.rollouts) if wanted.policy in ("", policy_of(path))]
    if not files:
        is_off = config.run.rollouts_mib == 0
        cure = "set run.rollouts_mib above 0 and train again" if is_off else "wait for the first learner step"
        raise RunFolderError("the run has kept no answers", where=str(folder.rollouts), cure=cure)
    if wanted.step is not None:
        _check_step(folder, wanted.step, {step_of(path) for path in files})
        files = [path for path in files if step_of(path) == wanted.step]
    return sorted(files, key=step_of, reverse=True)


def _held_out(folder: RunFolder, wanted: AnswerFilter) -> list[dict[str, Any]]:
    """Rows of held-out answers, the newest evaluation first."""
    kept = [row for row in read_samples(folder.rollouts) if row.get("kind") == HELD_OUT]
    rows = [row for row in kept if wanted.policy in ("", row.get("policy")) and isinstance(row.get("step"), int)]
    if not rows:
        cure = "wait for the first evaluation"
        raise RunFolderError("the run has kept no held-out answers", where=str(folder.rollouts), cure=cure)
    if wanted.step is not None:
        _check_step(folder, wanted.step, {row["step"] for row in rows})
        rows = [row for row in rows if row["step"] == wanted.step]
    return sorted(rows, key=lambda row: -row["step"])


def _check_step(folder: RunFolder, step: int, known: Collection[int]) -> None:
    if step in known:
        return
    near = sorted(sorted(known, key=lambda other: abs(other - step))[:4])
    told = f"one of {len(known)} steps from {min(known)} to {max(known)}, nearest: {', '.join(map(str, near))}"
    raise RunFolderError("no answers of this step were kept", where=str(folder.rollouts), got=step, wanted=told)


def _check_name(folder: RunFolder, what: str, name: str, known: Collection[str]) -> None:
    if name and name not in known:
        near = nearest(name, known)
        raise RunFolderError(
            f"no {what} of this name" if what == "task" else "no learning policy of this name",
            where=str(folder.path),
            got=name,
            wanted=f"one of {', '.join(known)}",
            cure=f"did you mean --{what} {near}?" if near else "",
        )


def shown_words(row: dict[str, Any]) -> str:
    """Describe an answer in one line: policy, step, task, rewards, tokens and ending."""
    parts = [f"{row.get('policy')} step {row.get('step')}", str(row.get("task")), f"reward {row.get('reward')}"]
    if row.get("kind") == "rescue":
        parts.insert(1, f"rescued by {row.get('source')}")
    if row.get("kind") == HELD_OUT:
        parts.insert(1, "held out")
    parts += [f"{name} {value}" for name, value in (row.get("rewards") or {}).items()]
    if row.get("tokens") is not None:
        parts.append(f"{row['tokens']} tokens, {row.get('finish_reason')}")
    if row.get("failure"):
        parts.append(f"no verdict: {row['failure']}")
    return printable(" · ".join(parts))


def printable(text: str) -> str:
    """Return `text` with control characters, which a policy may have written, as escapes; ends of lines stay."""
    return re.sub(r"[^\n -~]", lambda char: char[0] if char[0].isprintable() else ascii(char[0])[1:-1], text)
