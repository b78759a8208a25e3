"""The file that `mrl eval` keeps: results, settings and prompts of an evaluation."""

from typing import Any

import msgspec

from mrl.records.evaluation_messages import EvaluationResult, Together


class EvaluatedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluated policy: its model, its sampling settings, and its result."""

    subject: str
    """The policy as named on the command line."""
    model: str
    """Folder of the model, or ID@COMMIT on the hub; for a run's policy the model that its training began with."""
    engine: str
    dtype: str
    temperature: float
    top_p: float
    max_new_tokens: int
    prompt: dict[str, Any] = {}
    """Keys of the policy's `prompt` table that differ from their defaults."""
    result: EvaluationResult


class EvaluationFile(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one or several policies on the same prompts."""

    format: int = 1
    made_unix_s: float
    packages: dict[str, str]
    """Versions of mrl and of the packages that it depends on."""
    seed: int
    """Seed of the evaluation. The seed of an answer derives from it, the policy's name here, the prompt, and the
    answer's number."""
    samples: int
    k: list[int]
    success_reward: float
    tasks: dict[str, dict[str, Any]]
    """Configuration tables of the tasks from which the prompts come."""
    pool_seed: int
    prompt_ids: list[str]
    """Ids of all prompts, in the order asked."""
    policies: dict[str, EvaluatedPolicy]
    together: dict[str, Together] = {}
    """k -> results of the policies together with k answers of each; empty for one policy."""
