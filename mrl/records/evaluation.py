"""Evaluation requests and results: JSON files in the run folder, so that they survive every process.

A learner drops `evaluation/queue/<policy>-<step>.json`; the evaluator answers with `evaluation/<policy>-<step>.json`.
"""

import msgspec

from mrl.records.version import Version


class EvaluationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluate this published version on held-out prompts."""

    policy: str
    version: Version
    manifest_path: str
    num_prompts: int
    """0 takes the whole held-out split."""

    @property
    def file_name(self) -> str:
        """Name of the request and of its result."""
        return f"{self.policy}-{self.version.step}.json"


class TaskAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one task."""

    accuracy: float
    prompts: int


class EvaluatedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out answer for people to read."""

    task: str
    prompt: str
    completion: str
    reward: float


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one version, one answer per prompt sampled at the policy's temperature."""

    policy: str
    version: Version
    step: int
    accuracy: float
    per_task: dict[str, TaskAccuracy]
    answers: list[EvaluatedAnswer]
