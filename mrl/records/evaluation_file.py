"""The file that `mrl eval` keeps: what was measured, how, and of which prompts."""

from typing import Any

import msgspec

from mrl.records.evaluation_messages import EvaluationResult, Together


class EvaluatedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, how it sampled, and what came of it."""

    subject: str
    """What it was called on the command line."""
    model: str
    """The folder of its model, or ID@COMMIT on the hub; of a run's policy what it was trained from."""
    engine: str
    dtype: str
    temperature: float
    top_p: float
    max_new_tokens: int
    prompt: dict[str, Any] = {}
    """Keys of its `prompt` table that were set."""
    result: EvaluationResult


class EvaluationFile(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one policy or several on the same prompts."""

    format: int = 1
    made_unix_s: float
    packages: dict[str, str]
    """Versions of mrl and of what it stands on."""
    seed: int
    """Of the answers; the seed of one follows from this, the policy's name here, the prompt, and its number."""
    samples: int
    k: list[int]
    success_reward: float
    tasks: dict[str, dict[str, Any]]
    """Tables of the tasks that the prompts are of."""
    pool_seed: int
    prompt_ids: list[str]
    """All prompts, in the order asked."""
    policies: dict[str, EvaluatedPolicy]
    together: dict[str, Together] = {}
    """k -> what the policies solve together, k answers of each; empty for one policy."""
