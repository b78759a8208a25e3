"""Estimates from several answers to every prompt: pass@k, majorities, policies together, intervals over prompts.

For a prompt with n answers, c of them right, k answers chosen at random are all wrong with probability
C(n-c, k) / C(n, k), so that pass@k = 1 - C(n-c, k) / C(n, k) has no bias (arXiv 2107.03374, equation 1).
Shapes: P prompts, M policies.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrl.records.evaluation_messages import Estimate, PromptTally, Together

RESAMPLES = 2_000
"""Bootstrap samples of the prompts, for an interval."""
COVERAGE = 0.95
SEED = 17
"""Seed of the bootstrap, fixed so that equal values have equal intervals."""
VALUES_AT_ONCE = 1 << 21
ROUNDING = 1e-12
"""An agreement by chance that is closer to 1 than this counts as 1."""

Values = npt.NDArray[np.float64]
Kappas = dict[str, dict[str, float]]
"""Policy A -> policy B after A in order -> Cohen's kappa."""


class Majority(NamedTuple):
    """Outcome of a majority vote of the answers to one prompt."""

    right: float
    """1 where the most frequent answer is right, 0 where it is wrong; for tied answers the mean of theirs."""
    is_tied: bool


def fail_at_k(answered: npt.ArrayLike, right: npt.ArrayLike, k: int) -> Values:
    """Return [P] probabilities that k answers, drawn without replacement, are all wrong: C(n-c, k) / C(n, k).

    `answered` [P] holds n >= k of every prompt, `right` [P] holds c. A prompt with fewer than k wrong answers has
    exactly 0.
    """
    n, c = np.asarray(answered, dtype=np.float64), np.asarray(right, dtype=np.float64)
    assert (n >= k).all(), "a prompt has fewer answers than are drawn"
    fails = np.ones(n.shape)
    for drawn in range(k):
        fails *= (n - c - drawn) / (n - drawn)  # 0 from the draw on for which no wrong answer is left
    return fails


def passes(tallies: Sequence[PromptTally], k: int) -> dict[str, float]:
    """Return prompt id -> pass@k, for prompts with at least k answers."""
    enough = [one for one in tallies if one.answered >= k]
    fails = fail_at_k([one.answered for one in enough], [one.right for one in enough], k)
    return {one.prompt_id: float(value) for one, value in zip(enough, 1.0 - fails, strict=True)}


def majority(choices: Sequence[tuple[str, bool]]) -> Majority:
    """Return the majority vote over `choices`: (result extracted from an answer, whether the answer is right).

    Answers without an extracted result do not vote; without any vote the majority is wrong. A result with both right
    and wrong answers counts with the share of right ones.
    """
    votes = Counter(choice for choice, _ in choices if choice)
    if not votes:
        return Majority(0.0, is_tied=False)
    most = max(votes.values())
    right: defaultdict[str, int] = defaultdict(int)
    for choice, is_right in choices:
        right[choice] += is_right
    leading = [right[choice] / most for choice, number in votes.items() if number == most]
    return Majority(sum(leading) / len(leading), is_tied=len(leading) > 1)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of [P >= 1] values over prompts, with a 95 % interval: percentiles of a bootstrap over prompts.

    Answers to one prompt are no independent draws of prompts, so the bootstrap draws whole prompts. Where all values
    are equal, the interval has no width.
    """
    found = np.asarray(values, dtype=np.float64)
    rng, means = np.random.default_rng(SEED), list[Values]()
    at_once = max(1, VALUES_AT_ONCE // found.size)
    for start in range(0, RESAMPLES, at_once):
        places = rng.integers(0, found.size, size=(min(at_once, RESAMPLES - start), found.size))
        means.append(found[places].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(mean=float(found.mean()), low=float(low), high=float(high), prompts=found.size)


def together(tallies: Mapping[str, Sequence[PromptTally]], k: int) -> Together | None:
    """Estimate what policies solve together with k answers each; None where no prompt has k answers of every policy.

    Every number is the expectation over k answers drawn of each policy's own n. Answers of different policies are
    independent, so a joint probability is the product of the policies' own, prompt by prompt, without bias.
    """
    of_policy, union = {name: passes(found, k) for name, found in tallies.items()}, union_passes(tallies, k)
    if not union:
        return None
    solves = {name: np.array([found[prompt] for prompt in union]) for name, found in of_policy.items()}
    fails = {name: 1.0 - found for name, found in solves.items()}
    return Together(
        prompts=len(union),
        union=estimate(list(union.values())),
        alone={
            one: {other: float((solves[one] * fails[other]).mean()) for other in solves if other != one}
            for one in solves
        },
        rescuable={name: estimate((fails[name] * (1.0 - _all_fail(fails, but=name))).tolist()) for name in solves},
    )


def kappas(tallies: Mapping[str, Sequence[PromptTally]], k: int) -> Kappas:
    """Return how alike the prompts are that two policies solve: policy A -> policy B after A -> Cohen's kappa.

        kappa = (o - e) / (1 - e),   o = mean over prompts of p q + (1 - p) (1 - q),   e = P Q + (1 - P) (1 - Q)

    p and q are pass@k of A and B on a prompt, P and Q their means. o is how often both solve a prompt or both do not;
    e is how often independent policies of these accuracies would (Cohen 1960). Kappa is 1 for the same prompts, 0 for
    policies as alike as their accuracies alone make them, and below 0 where each solves what the other does not. It is
    NaN where e is 1: policies that both solve everything, or both nothing, always agree. The prompts are those of
    `together`. With k below n, p lies between 0 and 1, and even equal policies stay below 1.
    """
    of_policy = {name: passes(found, k) for name, found in tallies.items()}
    prompts = list(union_passes(tallies, k))
    solves = {name: np.array([found[prompt] for prompt in prompts]) for name, found in of_policy.items()}
    names = list(solves)
    return {
        one: {other: _kappa(solves[one], solves[other]) for other in names[place + 1 :]}
        for place, one in enumerate(names[:-1])
    }


def _kappa(p: Values, q: Values) -> float:
    if not p.size:
        return math.nan
    observed = float((p * q + (1 - p) * (1 - q)).mean())
    by_chance = float(p.mean() * q.mean() + (1 - p.mean()) * (1 - q.mean()))
    return math.nan if by_chance >= 1.0 - ROUNDING else (observed - by_chance) / (1.0 - by_chance)


def union_passes(tallies: Mapping[str, Sequence[PromptTally]], k: int) -> dict[str, float]:
    """Return prompt id -> probability that some policy solves the prompt with k answers of each.

    Only prompts with at least k answers of every policy are there.
    """
    of_policy = [passes(found, k) for found in tallies.values()]
    common = [prompt for prompt in of_policy[0] if all(prompt in other for other in of_policy)]
    return {prompt: 1.0 - math.prod(1.0 - found[prompt] for found in of_policy) for prompt in common}


def _all_fail(fails: Mapping[str, Values], *, but: str) -> Values:
    """Return [P] probabilities that no policy other than `but` solves a prompt."""
    return np.prod([found for name, found in fails.items() if name != but], axis=0)
