"""Comparison of runs of one configuration, by regime and seed: accuracy, cost, and intervals over seeds.

Accuracies are shares of held-out prompts; the average of a run is over its policies.
"""

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import each_metrics
from mrl.report.comparing.beyond_accuracy import BeyondAccuracy, beyond_accuracy
from mrl.report.run_data import RunData, read_run
from mrl.report.student_t import two_sided_quantile, two_sided_tail

PAUSE_S = 60.0
"""Seconds between two lines of metrics beyond which no attempt was going on: a supervisor writes every few seconds."""
SCORED = "scoring/tokens"
AVERAGE = "average"
"""Name of the curve of the mean over policies, in place of a policy's name."""
CONFIDENCE = 0.95
DROPPED_GROUPS = ("staleness/dropped_groups", "groups/uniform_dropped")
DROPPED_TOKENS = ("staleness/dropped_tokens", "groups/uniform_dropped_tokens")

ROUNDING = 1e-12
"""Differences of accuracy, and their standard errors, are 0 where they are smaller than this."""
TRAINED_PASSES = 3
"""Cost of training on a token, in forward passes: one forward pass, and a backward pass at twice its cost."""

Curve = dict[int, float]
"""Step -> held-out accuracy."""


class Spent(NamedTuple):
    """Time and scored tokens of one run, over all its attempts."""

    running_s: float
    """Seconds of all attempts, without the pauses between them."""
    scored_tokens: float
    """Answer tokens that engines scored for other policies, by every worker's last count (every 2 s, and per batch)."""


def spent_of(lines: Iterable[Mapping[str, Any]]) -> Spent:
    """Sum up the lines of `metrics.jsonl`. Memory holds their times alone, since the lines of days are gigabytes."""
    times_s = array("d")

    def timed() -> Iterator[Mapping[str, Any]]:
        for line in lines:
            if "time_unix_s" in line:
                times_s.append(float(line["time_unix_s"]))
            yield line

    scored_tokens = _scored_tokens(timed())
    gaps_s = np.diff(np.sort(times_s))
    return Spent(float(gaps_s[gaps_s <= PAUSE_S].sum()), scored_tokens)


def _scored_tokens(lines: Iterable[Mapping[str, Any]]) -> float:
    """Add up the last count of every life of a worker: a worker counts from its start, and a new life has a new pid."""
    told: dict[str, float] = {}
    pids: dict[str, int] = {}
    total = 0.0
    for line in lines:
        role = str(line.get("role", ""))
        pid = line.get("heartbeat", {}).get("pid", pids.get(role))
        if pid != pids.get(role):
            pids[role], told[role] = pid, 0.0
        scored = line.get("values", {}).get(SCORED)
        if scored is not None:
            last = told.get(role, 0.0)
            total += scored - last if scored >= last else scored
            told[role] = scored
    return total


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the half width of its 95 % interval over seeds. With one seed the half width is NaN."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Learning curves and cost of one run."""

    curves: Mapping[str, Curve]
    """Policy -> curve; `AVERAGE` -> mean over policies, at steps that all policies have."""
    own_answers: float
    """Answers that the policies sampled: trained on, or dropped as stale or uniform."""
    own_tokens: float
    """Tokens of these answers."""
    trained_tokens: float
    peer_tokens: float
    """Tokens of peers' answers, among the trained tokens."""
    shared_bytes: float
    wall_s: float
    """Seconds without the pauses between attempts; with them where `outcome_of` made this outcome."""
    scored_tokens: float = 0.0
    """Answer tokens that engines scored for other policies."""
    beyond: BeyondAccuracy | None = None
    """Which prompts policies solve together or apart, and how they answer."""

    @property
    def passed_tokens(self) -> float:
        """Compute in tokens of a forward pass: own and scored tokens count once, trained tokens three times."""
        return self.own_tokens + self.scored_tokens + TRAINED_PASSES * self.trained_tokens

    def start(self, name: str = AVERAGE) -> float:
        """Return the accuracy at the first evaluation."""
        return self.curves[name][min(self.curves[name])]

    def end(self, name: str = AVERAGE) -> float:
        """Return the accuracy at the last evaluation."""
        return self.curves[name][max(self.curves[name])]

    def best(self, name: str = AVERAGE) -> float:
        """Return the highest accuracy of all evaluations."""
        return max(self.curves[name].values())

    def area(self, name: str = AVERAGE) -> float:
        """Return the mean height of the curve between its first and last step, with straight lines between points."""
        steps = sorted(self.curves[name])
        curve, width = self.curves[name], steps[-1] - steps[0]
        if not width:
            return curve[steps[0]]
        pieces = ((b - a) * (curve[a] + curve[b]) / 2 for a, b in itertools.pairwise(steps))
        return sum(pieces) / width


@dataclass(frozen=True, slots=True)
class Comparison:
    """All outcomes by regime and seed, seeds in one order for all regimes; a regime without outcomes is left out."""

    outcomes: Mapping[str, Mapping[int, RunOutcome]]
    baseline: str
    """Regime against which the others are measured; when it has no outcome, there are no differences."""

    @property
    def regimes(self) -> list[str]:
        """Regimes in the order asked for."""
        return list(self.outcomes)

    @property
    def policies(self) -> list[str]:
        """Policies that learn, without the average."""
        first = next(iter(self.outcomes[self.regimes[0]].values()))
        return [name for name in first.curves if name != AVERAGE]

    def over_seeds(self, regime: str, what: str, name: str = AVERAGE) -> Interval:
        """Return the mean over seeds of `what`, a method of `RunOutcome`: start, end, best or area."""
        return interval([getattr(outcome, what)(name) for outcome in self.outcomes[regime].values()])

    def against_baseline(self, regime: str, what: str, name: str = AVERAGE) -> Interval:
        """Return the mean difference of `what` to the baseline, paired by seed; NaN where no seed has both regimes."""
        return interval(self._differences(regime, what, name))

    def measured(self, regime: str, what: Callable[[RunOutcome], float]) -> Interval:
        """Return the mean of any number of a run, over the seeds that have this number."""
        return interval([value for one in self.outcomes[regime].values() if not math.isnan(value := what(one))])

    def measured_against_baseline(self, regime: str, what: Callable[[RunOutcome], float]) -> Interval:
        """Return the mean difference of a number to the baseline, paired by seed, where both runs have the number."""
        found = (what(one) - what(other) for one, other in self._pairs(regime))
        return interval([value for value in found if not math.isnan(value)])

    def p_values(self) -> dict[str, float]:
        """Return regime -> p-value of a paired two-sided t-test of the end against the baseline, for all others.

        NaN where fewer than two seeds have both regimes, and where `p_value` returns NaN.
        """
        others = [regime for regime in self.regimes if regime != self.baseline]
        return {regime: p_value(self._differences(regime, "end", AVERAGE)) for regime in others}

    def _differences(self, regime: str, what: str, name: str) -> list[float]:
        return [getattr(one, what)(name) - getattr(other, what)(name) for one, other in self._pairs(regime)]

    def _pairs(self, regime: str) -> list[tuple[RunOutcome, RunOutcome]]:
        """Outcomes (of the regime, of the baseline), for every seed that both have."""
        base = self.outcomes.get(self.baseline, {})
        return [(one, base[seed]) for seed, one in self.outcomes[regime].items() if seed in base]

    def spent(self, regime: str, field: str) -> float:
        """Return the mean over seeds of a field of `RunOutcome`."""
        return mean(getattr(outcome, field) for outcome in self.outcomes[regime].values())

    def paired_spent(self, regime: str, field: str) -> tuple[float, float]:
        """Return means of a field (of the regime, of the baseline) over seeds that both have; NaN without any."""
        pairs = [(getattr(one, field), getattr(other, field)) for one, other in self._pairs(regime)]
        return (mean(one for one, _ in pairs), mean(other for _, other in pairs)) if pairs else (math.nan, math.nan)

    def mean_curve(self, regime: str, name: str = AVERAGE) -> dict[int, Interval]:
        """Return step -> mean accuracy over seeds, at steps that every seed has."""
        curves = [outcome.curves[name] for outcome in self.outcomes[regime].values()]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        return {step: interval([curve[step] for curve in curves]) for step in steps}


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values, with the half width of Student's 95 % interval."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, math.nan)
    quantile = two_sided_quantile(CONFIDENCE, len(values) - 1)
    return Interval(mean(values), quantile * stdev(values) / math.sqrt(len(values)))


def p_value(differences: Sequence[float]) -> float:
    """Return the p-value of Student's two-sided test that the mean of the differences is 0.

    NaN for fewer than two differences, and for equal differences that are not 0: they do not tell how far the next
    one would be off.
    """
    if len(differences) < 2:
        return math.nan
    error = stdev(differences) / math.sqrt(len(differences))
    if error < ROUNDING:
        return math.nan if abs(mean(differences)) >= ROUNDING else 1.0
    return two_sided_tail(mean(differences) / error, len(differences) - 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values adjusted for their number (Holm 1979): the i-th smallest of m times m - i + 1, and at most 1.

    An adjusted value is never less than the one before it. The probability that any true null hypothesis has an
    adjusted value below a bound is at most that bound. NaN stays, and counts among the m.
    """
    adjusted, least = dict(p_values), 0.0
    known = [name for name in p_values if not math.isnan(p_values[name])]
    for place, name in enumerate(sorted(known, key=lambda name: p_values[name])):
        least = max(least, min(1.0, p_values[name] * (len(p_values) - place)))
        adjusted[name] = least
    return adjusted


def read_outcome(folder: Path) -> RunOutcome:
    """Read the outcome of the run in `folder`. Raises RunFolderError when the folder is no run."""
    spent = spent_of(each_metrics(RunFolder(folder).metrics_jsonl))
    return replace(outcome_of(read_run(folder)), wall_s=spent.running_s, scored_tokens=spent.scored_tokens)


def outcome_of(data: RunData) -> RunOutcome:
    """Return the outcome of a run by its data alone, without pauses and scored tokens; frozen policies are left out."""
    tables = data.config["policies"]
    learning = [name for name in tables if not tables[name].get("frozen")]
    curves: dict[str, Curve] = {name: dict(sorted(data.accuracy[name][""].items())) for name in learning}
    common = sorted(set.intersection(*(set(curve) for curve in curves.values())))
    curves[AVERAGE] = {step: mean(curves[name][step] for name in learning) for step in common}
    answers = {name: _fresh_groups(tables[name]) * tables[name]["rollout"]["group_size"] for name in learning}
    steps = {name: list(data.steps.get(name, {}).values()) for name in learning}
    group = {name: tables[name]["rollout"]["group_size"] for name in learning}
    return RunOutcome(
        curves=curves,
        own_answers=sum(
            answers[name] * len(steps[name]) + group[name] * _sum(steps[name], *DROPPED_GROUPS) for name in learning
        ),
        own_tokens=sum(
            answers[name] * _sum(steps[name], "tokens/answer_mean") + _sum(steps[name], *DROPPED_TOKENS)
            for name in learning
        ),
        trained_tokens=sum(_sum(steps[name], "tokens/trained") for name in learning),
        peer_tokens=sum(_sum(steps[name], "sharing/peer_tokens", "sharing/rescue_tokens") for name in learning),
        shared_bytes=sum(flow.get("bytes", 0.0) for flow in data.flows.values()),
        wall_s=data.wall_s,
        beyond=beyond_accuracy(data),
    )


def _fresh_groups(table: Mapping[str, Any]) -> int:
    """Number of groups that a policy samples for a step, without groups of earlier steps that it trains on again."""
    num_groups: int = table["learner"]["prompts_per_step"]
    return num_groups - round(table["learner"].get("reuse_share", 0.0) * num_groups)


def _sum(steps: Iterable[Mapping[str, float]], *metrics: str) -> float:
    return sum(values.get(metric, 0.0) for values in steps for metric in metrics)
