"""Results of evaluations: JSON files in the run folder, `evaluation/<policy>-<step>.json`."""

import msgspec

from mrl.records.readable_turns import ReadableTurn
from mrl.records.version import Version


class TaskAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one task."""

    accuracy: float
    prompts: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over prompts, with its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float
    prompts: int
    """Number of prompts in the mean."""


class PromptTally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the answers to one held-out prompt."""

    prompt_id: str
    answered: int
    right: int
    """Answers among `answered` that are right."""


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Results of several policies together, each with k answers of its own to every prompt."""

    prompts: int
    """Prompts to which every policy has at least k answers; all numbers are about these prompts."""
    union: Estimate
    """Probability that some policy solves the prompt: 1 - product over policies of C(n-c, k) / C(n, k), for c right
    ones among n answers."""
    alone: dict[str, dict[str, float]]
    """A -> B -> share of the prompts that A solves and B does not, for A other than B."""
    rescuable: dict[str, Estimate]
    """Policy -> share of the prompts that this policy does not solve and another policy does."""


class EvaluatedAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One held-out answer for people to read."""

    task: str
    prompt: str
    completion: str
    reward: float
    opening: str = ""
    """First messages of an episode as the policy was shown them, special tokens included; empty for a plain answer."""
    turns: list[ReadableTurn] = []
    """Turns of an episode after its opening; empty for a plain answer."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one version, with one or several answers to every prompt.

    New weights may reach the engine during an answer, as in training; the new version then samples the rest of the
    answer.
    """

    policy: str
    version: Version
    """Version whose evaluation was asked for."""
    step: int
    accuracy: float
    """Mean over prompts of the share of right answers (avg@n)."""
    per_task: dict[str, TaskAccuracy]
    answers: list[EvaluatedAnswer]
    oldest: Version
    """Oldest version that sampled a token."""
    newest: Version
    own_token_share: float
    """Share of the tokens that `version` sampled, 0 to 1."""
    missing: int
    """Answers that did not come: refused, lost again and again, or not begun when the next evaluation was due."""
    seconds: float
    """Seconds from the start of the evaluation to the last answer."""
    samples: int = 1
    """Answers asked for per prompt (n)."""
    estimates: dict[str, Estimate] = {}
    """Estimates where n > 1: "pass@k" for every k asked for, over the prompts with at least k answers; "avg@n";
    "maj@n", over the prompts with all n answers, the share whose most frequent answer is right."""
    tied_majorities: int = 0
    """Prompts with several equally frequent answers; such a prompt counts in "maj@n" with the mean of these answers."""
    prompts: list[PromptTally] = []
    """Counts of every prompt with an answer, in the order asked."""

    @property
    def file_name(self) -> str:
        """Name of the file of this result."""
        return result_name(self.policy, self.step)


def result_name(policy: str, step: int) -> str:
    """Return the name of the file with the result of a step."""
    return f"{policy}-{step}.json"
