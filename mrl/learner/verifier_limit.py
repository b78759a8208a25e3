"""Limit of own answers on which verifiers fail: a broken verifier would silently leave a policy nothing to learn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.errors import TaskError
from mrl.records.rollouts import ScoredGroup
from mrl.tasks.rewards import OF_THE_ANSWER


@dataclass(slots=True)
class VerifierFailures:
    """Counts of the answers that came in since the last batch, and of those on which a verifier failed."""

    answers: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Task -> its failures."""
    first: dict[str, str] = field(default_factory=dict)
    """Task -> its first failure, in words."""

    def note(self, groups: Sequence[ScoredGroup]) -> None:
        """Count new groups. A failure that is an answer's own fault makes the answer wrong, and does not count."""
        for group in groups:
            self.answers += len(group.answers)
            for answer in group.answers:
                if answer.failure and not answer.failure.startswith(OF_THE_ANSWER):
                    self.failed[group.task] += 1
                    self.first.setdefault(group.task, answer.failure)

    @property
    def share(self) -> float:
        """Share of the answers on which a verifier failed."""
        return self.failed.total() / self.answers if self.answers else 0.0

    def check(self, most: float, *, step: int) -> None:
        """Raises TaskError when the share is above `most`."""
        if self.share <= most:
            return
        task, _ = self.failed.most_common(1)[0]
        raise TaskError(
            f"verifiers failed on {self.failed.total()} of the {self.answers} answers of step {step}",
            where=f"tasks.{task}.verifier",
            got=self.first[task],
            wanted=f"at most run.max_verifier_failures = {most:g} of them",
            cure="fix the verifier (`mrl check` tries it on three prompts), or raise run.max_verifier_failures",
        )
