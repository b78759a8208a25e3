"""The tables of a comparison, with what only its runs' metrics tell: time of all attempts, tokens scored for others."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import read_metrics
from mrl.report.comparison import Comparison, Outcome, read_outcome
from mrl.report.comparison_table import Grid, as_json, grids

PAUSE_S = 60.0
"""A supervisor writes every few seconds; where nobody wrote for longer than this, no attempt was going on."""
SCORED = "scoring/tokens"
SCORED_HEAD = "scored tokens"
SCORED_PLACE = 5
"""Column of the spendings that the scored tokens come before."""


class Spent(NamedTuple):
    """What the metrics of one run say over all its attempts."""

    running_s: float
    """Without the pauses between attempts."""
    scored_tokens: float
    """Answer tokens that engines scored for other policies, as last told by every worker (every 2 s, and per batch)."""


class Measured(NamedTuple):
    """One run of the comparison that came to its end."""

    outcome: Outcome
    spent: Spent


def measure(folder: Path) -> Measured:
    """What the run in `folder` reached and spent. Raises RunFolderError when it is none."""
    spent = spent_of(read_metrics(RunFolder(folder).metrics_jsonl))
    return Measured(replace(read_outcome(folder), wall_s=spent.running_s), spent)


def spent_of(lines: Sequence[Mapping[str, Any]]) -> Spent:
    """The same from the lines of `metrics.jsonl`."""
    times_s = sorted(float(line["time_unix_s"]) for line in lines if "time_unix_s" in line)
    gaps_s = (later - earlier for earlier, later in itertools.pairwise(times_s))
    return Spent(sum(gap_s for gap_s in gaps_s if gap_s <= PAUSE_S), _scored_tokens(lines))


def _scored_tokens(lines: Iterable[Mapping[str, Any]]) -> float:
    """A worker counts from its start, so the last count of every life is added up; a new life has a new pid."""
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


def comparison_grids(found: Mapping[str, Mapping[int, Measured]]) -> list[Grid]:
    """Accuracies, accuracies of each policy, spendings; `found` is regime -> seed -> run."""
    averages, policies, spendings = grids(comparison_of(found))
    title = f"Held-out accuracy, mean over policies and seeds ({num_seeds(found)}), 95 % interval"
    return [averages._replace(title=title), policies, _with_scored(spendings, found)]


def comparison_of(found: Mapping[str, Mapping[int, Measured]]) -> Comparison:
    """The outcomes alone."""
    return Comparison(
        {regime: {seed: run.outcome for seed, run in by_seed.items()} for regime, by_seed in found.items()}
    )


def comparison_json(found: Mapping[str, Mapping[int, Measured]]) -> dict[str, Any]:
    """Every number of the comparison, the scored tokens of each seed among them."""
    told = as_json(comparison_of(found))
    for regime, by_seed in found.items():
        for seed, run in by_seed.items():
            told[regime]["seeds"][str(seed)]["scored_tokens"] = run.spent.scored_tokens
    return told


def num_seeds(found: Mapping[str, Mapping[int, Measured]]) -> str:
    """How many seeds every row has: one number where all have as many."""
    numbers = {regime: len(by_seed) for regime, by_seed in found.items()}
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values()))} each"
    return ", ".join(f"{regime} {number}" for regime, number in numbers.items())


def _with_scored(grid: Grid, found: Mapping[str, Mapping[int, Measured]]) -> Grid:
    """A column for what was scored, where any run scored."""
    scored = {regime: mean(run.spent.scored_tokens for run in by_seed.values()) for regime, by_seed in found.items()}
    if not any(scored.values()):
        return grid
    cells = [SCORED_HEAD, *(f"{scored[row[0]]:,.0f}" for row in grid.rows)]
    head, *rows = [
        [*row[:SCORED_PLACE], cell, *row[SCORED_PLACE:]]
        for row, cell in zip([grid.head, *grid.rows], cells, strict=True)
    ]
    return Grid(grid.title, head, rows)
