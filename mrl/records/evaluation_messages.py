"""Results of evaluations: JSON files in the run folder, `evaluation/<policy>-<step>.json`."""

import msgspec

from mrl.records.told_turns import ToldTurn
from mrl.records.version import Version


class TaskAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one task."""

    accuracy: float
    prompts: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over prompts, with the ends of its 95 % interval over prompts."""

    mean: float
    low: float
    high: float
    prompts: int
    """How many the mean is over."""


class PromptTally(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one held-out prompt."""

    prompt_id: str
    answered: int
    right: int
    """Of these answers."""


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """What several policies solve, each with k answers of its own to every prompt."""

    prompts: int
    """Those to which every policy has at least k answers; all numbers are about them."""
    union: Estimate
    """Some policy solves the prompt: 1 - product over policies of C(n-c, k) / C(n, k)."""
    alone: dict[str, dict[str, float]]
    """A -> B -> share of the prompts that A solves and B does not, for A other than B."""
    rescuable: dict[str, Estimate]
    """Policy -> share of the prompts that it does not solve and another policy does."""


class EvaluatedAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One held-out answer for people to read."""

    task: str
    prompt: str
    completion: str
    reward: float
    opening: str = ""
    """Of an episode: its first messages as the policy was shown them, special tokens included."""
    turns: list[ToldTurn] = []
    """Of an episode: who said what behind them."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy of one version, with one answer or several to every prompt.

    New weights overtake answers in the engine as they do in training: the rest of an answer is theirs.
    """

    policy: str
    version: Version
    """The one that was asked for."""
    step: int
    accuracy: float
    """Mean over prompts of the share of their answers that are right (avg@n)."""
    per_task: dict[str, TaskAccuracy]
    answers: list[EvaluatedAnswer]
    oldest: Version
    """Oldest version that sampled a token."""
    newest: Version
    own_token_share: float
    """Share of the tokens that the asked version sampled, 0 to 1."""
    missing: int
    """Answers that did not come: refused, lost again and again, or not begun when the next evaluation was due."""
    seconds: float
    """From the question to the last answer."""
    samples: int = 1
    """Answers that every prompt was asked for (n)."""
    estimates: dict[str, Estimate] = {}
    """With several answers: "pass@k" of every k asked for, over the prompts with at least k answers; "avg@n"; "maj@n"
    over the prompts with all n, how often the answer given most often is right."""
    tied_majorities: int = 0
    """Prompts in which several answers were given most often; each counts with the mean of those answers."""
    prompts: list[PromptTally] = []
    """What every prompt with an answer came to, in the order asked."""

    @property
    def file_name(self) -> str:
        """Name of the file of this result."""
        return result_name(self.policy, self.step)


def result_name(policy: str, step: int) -> str:
    """Name of the file of the result of a step."""
    return f"{policy}-{step}.json"
