"""Measures of one run beyond accuracy: held-out prompts solved together and apart, and form of answers at the end.

Accuracy says how much each policy solves; these measures say whether the policies solve the same prompts. Frozen
policies are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from mrl.metrics.pass_at_k import kappas, together
from mrl.report.run_data import RunData

LAST_STEPS = 10
"""Last steps over which entropy and length are averaged, since a single step has only a few prompts."""
ENTROPY, LENGTH = "entropy/sampled_nats", "tokens/answer_mean"
MEASURES = ("union", "rescuable", "likeness")
"""Attributes of `SolvedTogether` that are one number for all policies."""


class SolvedTogether(NamedTuple):
    """Prompts solved together and apart in one evaluation of all policies, with k answers of each to every prompt."""

    step: int
    union: float
    """Share of prompts that some policy solves."""
    alone: Mapping[str, Mapping[str, float]]
    """Policy A -> policy B -> share of the prompts that A solves and B does not."""
    rescuable_of: Mapping[str, float]
    """Policy -> share of the prompts that it does not solve and a peer does."""
    likeness_of: Mapping[str, Mapping[str, float]]
    """Policy A -> policy B after A in order -> Cohen's kappa of the prompts that they solve; NaN where undefined."""

    @property
    def rescuable(self) -> float:
        """Mean of `rescuable_of` over policies."""
        return fmean(self.rescuable_of.values())

    @property
    def likeness(self) -> float:
        """Mean of `likeness_of` over the pairs for which it is defined."""
        return mean_of_known([value for behind in self.likeness_of.values() for value in behind.values()])


@dataclass(frozen=True, slots=True)
class BeyondAccuracy:
    """Measures of one run beyond accuracy."""

    k: int
    """Answers of each policy to a prompt: the largest k of the configuration."""
    start: SolvedTogether | None
    """First evaluation with tallies of all learning policies; None without one, or with fewer than two policies."""
    end: SolvedTogether | None
    """Last such evaluation."""
    entropy_nats: Mapping[str, float]
    """Policy -> mean of -log p in nats over its sampled tokens, in the last steps."""
    answer_tokens: Mapping[str, float]
    """Policy -> mean length of its own answers in tokens, in the last steps."""

    def measures(self) -> dict[str, float]:
        """Return name -> number. Names: `union/start`, `alone/A/B/end`, `rescuable/A/end`, `likeness/A/B/end`,
        `entropy_nats`, ...
        """
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
    """Return the mean of all values that are not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def common_steps(data: RunData, policies: Sequence[str]) -> list[int]:
    """Return the steps at which all policies have tallies, in order; empty for fewer than two policies."""
    of_policy = [{step for step, found in data.tallies.get(name, {}).items() if found} for name in policies]
    return sorted(set.intersection(*of_policy)) if len(of_policy) > 1 else []


def solved_together(data: RunData, policies: Sequence[str], *, step: int, k: int) -> SolvedTogether | None:
    """Measure a step at which all policies have tallies; None where no prompt has k answers of every policy."""
    tallies = {name: data.tallies[name][step] for name in policies}
    found = together(tallies, k)
    if found is None:
        return None
    rescuable = {name: value.mean for name, value in found.rescuable.items()}
    return SolvedTogether(step, found.union.mean, found.alone, rescuable, kappas(tallies, k))


def beyond_accuracy(data: RunData) -> BeyondAccuracy:
    """Measure a run by its data."""
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
    """Return the largest k of pass@k in the run's configuration."""
    return max(data.config.get("evaluation", {}).get("k", [1]))


def _first_and_last(steps: Sequence[int]) -> Sequence[int]:
    return (steps[0], steps[-1]) if steps else ()


def _of_last_steps(data: RunData, policy: str, metric: str) -> float:
    by_step = data.steps.get(policy, {})
    return mean_of_known([by_step[step].get(metric, math.nan) for step in sorted(by_step)[-LAST_STEPS:]])
