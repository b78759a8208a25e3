"""How many own answers verifiers failed on. A verifier that mostly fails would train a policy on nothing, unsaid."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.errors import TaskError
from mrl.records.rollouts import ScoredGroup
from mrl.tasks.rewards import OF_THE_ANSWER


@dataclass(slots=True)
class VerifierFailures:
    """Of the answers that came in since a batch was formed."""

    answers: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By task."""
    first: dict[str, str] = field(default_factory=dict)
    """What the first one of each task was."""

    def note(self, groups: Sequence[ScoredGroup]) -> None:
        """New groups. One that is an answer's own fault makes it wrong, and is none of the verifier's."""
        for group in groups:
            self.answers += len(group.answers)
            for answer in group.answers:
                if answer.failure and not answer.failure.startswith(OF_THE_ANSWER):
                    self.failed[group.task] += 1
                    self.first.setdefault(group.task, answer.failure)

    @property
    def share(self) -> float:
        """Of the answers on which a verifier failed."""
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
            cure="mend the verifier (`mrl check` tries it on three prompts), or raise run.max_verifier_failures",
        )
