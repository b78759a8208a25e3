"""What the policies of one run solve together and apart on held-out prompts, and how they answer at the end.

Accuracy says how much each policy solves; this says whether they solve the same. Frozen policies are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from mrl.metrics.pass_at_k import kappas, together
from mrl.report.run_data import RunData

LAST_STEPS = 10
"""One step's entropy and length are those of a few prompts, so the end is the mean of so many."""
ENTROPY, LENGTH = "entropy/sampled_nats", "tokens/answer_mean"
MEASURES = ("union", "rescuable", "likeness")
"""Numbers of `SolvedTogether`, each a mean over policies or pairs."""


class SolvedTogether(NamedTuple):
    """Of one evaluation that all policies had, k answers of each to every prompt."""

    step: int
    union: float
    """Share of prompts that some policy solves."""
    alone: Mapping[str, Mapping[str, float]]
    """A -> B -> share of the prompts that A solves and B does not."""
    rescuable_of: Mapping[str, float]
    """Policy -> share of the prompts that it does not solve and a peer does."""
    likeness_of: Mapping[str, Mapping[str, float]]
    """A -> B, of the policies behind it -> Cohen's kappa of the prompts that they solve; NaN where it has no value."""

    @property
    def rescuable(self) -> float:
        """Mean over policies."""
        return fmean(self.rescuable_of.values())

    @property
    def likeness(self) -> float:
        """Mean over the pairs that have a value."""
        return mean_of_known([value for behind in self.likeness_of.values() for value in behind.values()])


@dataclass(frozen=True, slots=True)
class BeyondAccuracy:
    """Of one run."""

    k: int
    """Answers of each policy to a prompt: the largest k of the configuration."""
    start: SolvedTogether | None
    """None where no evaluation has the prompts of two policies one by one."""
    end: SolvedTogether | None
    entropy_nats: Mapping[str, float]
    """Policy -> mean of -log p over its sampled tokens, in the last steps."""
    answer_tokens: Mapping[str, float]
    """Policy -> mean length of its own answers, in the last steps."""

    def measures(self) -> dict[str, float]:
        """Name -> number: `union/start`, `alone/A/B/end`, `rescuable/A/end`, `likeness/A/B/end`, `entropy_nats`, ..."""
        found: dict[str, float] = {}
        for when, solved in (("start", self.start), ("end", self.end)):
            if solved is None:
                continue
            found |= {f"{name}/{when}": getattr(solved, name) for name in MEASURES}
            for room, pairs in (("alone", solved.alone), ("likeness", solved.likeness_of)):
                found |= {f"{room}/{a}/{b}/{when}": value for a, row in pairs.items() for b, value in row.items()}
            found |= {f"rescuable/{name}/{when}": value for name, value in solved.rescuable_of.items()}
        for room, by_policy in (("entropy_nats", self.entropy_nats), ("answer_tokens", self.answer_tokens)):
            found[room] = fmean(by_policy.values()) if by_policy else math.nan
            found |= {f"{room}/{name}": value for name, value in by_policy.items()}
        return found


def mean_of_known(values: Sequence[float]) -> float:
    """Without NaN; NaN where nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def common_steps(data: RunData, policies: Sequence[str]) -> list[int]:
    """At which all of them have tallies, in order; none of fewer than two policies."""
    of_policy = [{step for step, found in data.tallies.get(name, {}).items() if found} for name in policies]
    return sorted(set.intersection(*of_policy)) if len(of_policy) > 1 else []


def solved_together(data: RunData, policies: Sequence[str], *, step: int, k: int) -> SolvedTogether | None:
    """At a step at which all have tallies; None where no prompt has k answers of every policy."""
    tallies = {name: data.tallies[name][step] for name in policies}
    found = together(tallies, k)
    if found is None:
        return None
    rescuable = {name: value.mean for name, value in found.rescuable.items()}
    return SolvedTogether(step, found.union.mean, found.alone, rescuable, kappas(tallies, k))


def beyond_accuracy(data: RunData) -> BeyondAccuracy:
    """From what a finished run keeps."""
    tables = data.config["policies"]
    learning = [name for name in tables if not tables[name].get("frozen")]
    k = most_answers(data)
    ends = [solved_together(data, learning, step=step, k=k) for step in _first_and_last(common_steps(data, learning))]
    start, end = ends or (None, None)
    return BeyondAccuracy(
        k=k,
        start=start,
        end=end,
        entropy_nats={name: _of_last_steps(data, name, ENTROPY) for name in learning},
        answer_tokens={name: _of_last_steps(data, name, LENGTH) for name in learning},
    )


def most_answers(data: RunData) -> int:
    """The largest k that the run was to be measured with."""
    return max(data.config.get("evaluation", {}).get("k", [1]))


def _first_and_last(steps: Sequence[int]) -> Sequence[int]:
    return (steps[0], steps[-1]) if steps else ()


def _of_last_steps(data: RunData, policy: str, metric: str) -> float:
    by_step = data.steps.get(policy, {})
    return mean_of_known([by_step[step].get(metric, math.nan) for step in sorted(by_step)[-LAST_STEPS:]])
