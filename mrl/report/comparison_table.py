"""Comparisons of runs as tables, for the terminal, as Markdown and as JSON; evaluations as tables for the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.records.evaluation_file import EvaluationFile
from mrl.records.evaluation_messages import Estimate, EvaluationResult, Together
from mrl.report.comparing.beyond_table import beyond_grids, beyond_json, interval_json, known_or_none, measures_of
from mrl.report.comparing.grid import NOTHING, Grid, plus_minus, signed_interval
from mrl.report.comparison import AVERAGE, Comparison, holm

SHOWN = ("start", "end", "best", "area")
"""Numbers of a learning curve that tables show; methods of `RunOutcome`."""
MEBIBYTE = 1024.0 * 1024.0


def grids(comparison: Comparison) -> list[Grid]:
    """Return tables: average over policies, beyond accuracy, each policy, cost, and gain and cost over the baseline."""
    gains = [_gains(comparison)] if set(comparison.regimes) > {comparison.baseline} else []
    return [_averages(comparison), *beyond_grids(comparison), _policies(comparison), _spendings(comparison), *gains]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return every number of the comparison by regime, with the curves of each seed."""
    p_values = comparison.p_values()
    adjusted = holm(p_values)
    return {
        regime: {
            "average": _told(comparison, regime, AVERAGE),
            "policies": {name: _told(comparison, regime, name) for name in comparison.policies},
            "end_against_baseline": interval_json(comparison.against_baseline(regime, "end")),
            "area_against_baseline": interval_json(comparison.against_baseline(regime, "area")),
            "p": known_or_none(p_values.get(regime, math.nan)),
            "p_holm": known_or_none(adjusted.get(regime, math.nan)),
            "beyond_accuracy": beyond_json(comparison, regime),
            "seeds": {
                str(seed): {
                    "curves": {name: {str(step): a for step, a in c.items()} for name, c in outcome.curves.items()},
                    "own_answers": outcome.own_answers,
                    "own_tokens": outcome.own_tokens,
                    "trained_tokens": outcome.trained_tokens,
                    "peer_tokens": outcome.peer_tokens,
                    "shared_bytes": outcome.shared_bytes,
                    "wall_s": outcome.wall_s,
                    "scored_tokens": outcome.scored_tokens,
                    "passed_tokens": outcome.passed_tokens,
                    "beyond_accuracy": {name: known_or_none(value) for name, value in measures_of(outcome).items()},
                }
                for seed, outcome in comparison.outcomes[regime].items()
            },
        }
        for regime in comparison.regimes
    }


def _averages(comparison: Comparison) -> Grid:
    base = comparison.baseline
    head = ["regime", *SHOWN, f"end - {base}", f"area - {base}"]
    rows = [
        [
            regime,
            *(plus_minus(comparison.over_seeds(regime, what)) for what in SHOWN),
            *(_difference(comparison, regime, what) for what in ("end", "area")),
        ]
        for regime in comparison.regimes
    ]
    return Grid(
        f"Held-out accuracy, mean over policies and seeds ({seeds_told(comparison)}), 95 % interval", head, rows
    )


def _policies(comparison: Comparison) -> Grid:
    names = comparison.policies
    head = ["regime", *(f"{name} {what}" for name in names for what in SHOWN)]
    rows = [
        [regime, *(plus_minus(comparison.over_seeds(regime, what, name)) for name in names for what in SHOWN)]
        for regime in comparison.regimes
    ]
    return Grid("Held-out accuracy of each policy, 95 % interval", head, rows)


def _spendings(comparison: Comparison) -> Grid:
    """Table of cost; tokens scored for other policies have a column where any run has such tokens."""
    scores = any(comparison.spent(regime, "scored_tokens") for regime in comparison.regimes)
    head = [
        "regime",
        "own answers",
        "own tokens",
        "trained tokens",
        "of peers",
        "scored tokens",
        "MiB shared",
        "minutes",
    ]
    rows = [head, *(_spent(comparison, regime) for regime in comparison.regimes)]
    shown = [place for place, name in enumerate(head) if scores or name != "scored tokens"]
    head, *rows = [[row[place] for place in shown] for row in rows]
    return Grid("Spent per run, all policies, mean over seeds", head, rows)


def _gains(comparison: Comparison) -> Grid:
    """Table of gain and cost. Costs are multiples of the baseline's, except for bytes: the baseline may share none."""
    base, p_values = comparison.baseline, comparison.p_values()
    adjusted = holm(p_values)
    head = ["regime", f"end - {base}", "p", f"p of {len(p_values)} (Holm)", "trained tokens", "compute", "MiB shared"]
    rows = [
        [
            regime,
            _difference(comparison, regime, "end"),
            *(NOTHING if math.isnan(p) else f"{p:.4f}" for p in (p_values[regime], adjusted[regime])),
            *(_multiple(comparison, regime, field) for field in ("trained_tokens", "passed_tokens")),
            NOTHING
            if math.isnan(shared := comparison.paired_spent(regime, "shared_bytes")[0])
            else f"{shared / MEBIBYTE:.2f}",
        ]
        for regime in p_values
    ]
    return Grid(f"Gain on {base}, paired by seed, and what it cost", head, rows)


def _multiple(comparison: Comparison, regime: str, field: str) -> str:
    own, base = comparison.paired_spent(regime, field)
    return NOTHING if math.isnan(base) or not base else f"x {own / base:.2f}"


def _spent(comparison: Comparison, regime: str) -> list[str]:
    trained, peers = (comparison.spent(regime, field) for field in ("trained_tokens", "peer_tokens"))
    return [
        regime,
        f"{comparison.spent(regime, 'own_answers'):,.0f}",
        f"{comparison.spent(regime, 'own_tokens'):,.0f}",
        f"{trained:,.0f}",
        f"{peers / trained:.1%}" if trained else "-",
        f"{comparison.spent(regime, 'scored_tokens'):,.0f}",
        f"{comparison.spent(regime, 'shared_bytes') / MEBIBYTE:.2f}",
        f"{comparison.spent(regime, 'wall_s') / 60:.1f}",
    ]


def seeds_told(comparison: Comparison) -> str:
    """Describe how many seeds every regime has: one number where all have as many."""
    numbers = {regime: len(comparison.outcomes[regime]) for regime in comparison.regimes}
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values()))} each"
    return ", ".join(f"{regime} {number}" for regime, number in numbers.items())


def _difference(comparison: Comparison, regime: str, what: str) -> str:
    if regime == comparison.baseline:
        return ""
    return signed_interval(comparison.against_baseline(regime, what, AVERAGE))


def _told(comparison: Comparison, regime: str, name: str) -> dict[str, dict[str, float | None]]:
    return {what: interval_json(comparison.over_seeds(regime, what, name)) for what in SHOWN}


def evaluation_grids(evaluation: EvaluationFile) -> list[Grid]:
    """Return tables of an evaluation: policies, their tasks, and the policies together."""
    results = {label: policy.result for label, policy in evaluation.policies.items()}
    asked = f"{len(evaluation.prompt_ids)} prompts, {evaluation.samples} answer{'s' * (evaluation.samples > 1)} to each"
    grids = [policy_grid(results, f"held-out answers: {asked}"), _task_grid(results)]
    return grids + [grid for k, found in evaluation.together.items() for grid in together_grids(found, int(k))]


def policy_grid(results: Mapping[str, EvaluationResult], title: str) -> Grid:
    """Return a table of every measure of every policy, with its 95 % interval over prompts."""
    names = list(dict.fromkeys(name for result in results.values() for name in result.estimates)) or ["accuracy"]
    head = ["policy", *names, "ties", "missing"]
    rows = []
    for label, result in results.items():
        measured = [shown(result.estimates.get(name)) for name in names]
        if not result.estimates:
            measured = [f"{result.accuracy:.3f}"] + [NOTHING] * (len(names) - 1)
        rows.append([label, *measured, f"{result.tied_majorities}", f"{result.missing}"])
    return Grid(title, head, rows)


def together_grids(found: Together, k: int) -> list[Grid]:
    """Return two tables of policies with k answers each: prompts solved together, and by one policy but not another."""
    names = list(found.alone)
    title = f"together, {k} answer{'s' * (k > 1)} of each policy, {found.prompts} prompts"
    rescued = [[f"unsolved by {name}, solved by another", shown(found.rescuable[name])] for name in names]
    lines = [[f"union pass@{k}", shown(found.union)], *rescued]
    rows = [[name, *(_share(found.alone[name].get(other)) for other in names)] for name in names]
    matrix = Grid(f"row solves with {k}, column does not", ["", *names], rows)
    return [Grid(title, ["share of prompts", ""], lines), matrix]


def difference_grid(title: str, rows: Sequence[tuple[str, int, float, float, Estimate]]) -> Grid:
    """Return a table of rows (policy, k, pass@k before, after, difference), with intervals over prompts."""
    told = [[who, f"pass@{k}", f"{before:.3f}", f"{after:.3f}", shown(change, signed=True), f"{change.prompts}"]
            for who, k, before, after, change in rows]  # fmt: skip
    return Grid(title, ["policy", "measure", "A", "B", "B - A", "prompts"], told)


def shown(found: Estimate | None, *, signed: bool = False) -> str:
    """Return an estimate with its interval, `0.812 [0.790, 0.834]`; `-` for None."""
    if found is None:
        return NOTHING
    form = "+.3f" if signed else ".3f"
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"


def _task_grid(results: Mapping[str, EvaluationResult]) -> Grid:
    tasks = sorted({task for result in results.values() for task in result.per_task})
    rows = [
        [task, *(_share(result.per_task[task].accuracy if task in result.per_task else None)
                 for result in results.values())]
        for task in tasks
    ]  # fmt: skip
    return Grid("share of right answers by task", ["task", *results], rows)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
