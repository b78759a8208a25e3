"""Measures beyond accuracy as tables: means over seeds, and differences paired by seed."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mrl.report.comparing.beyond_accuracy import MEASURES
from mrl.report.comparing.grid import Grid, plus_minus, signed_interval
from mrl.report.comparison import Comparison, Interval, RunOutcome

WHEN = ("start", "end")
DIGITS = {"entropy_nats": 2, "answer_tokens": 1}
"""Measure -> digits behind the point; 3 for all others."""
OF_ANSWERS = {"entropy_nats": "nats/token", "answer_tokens": "tokens"}
"""Measure of the form of answers -> its heading."""


def beyond_grids(comparison: Comparison) -> list[Grid]:
    """Return tables of means over policies, differences to the baseline, and ordered pairs of policies.

    A measure that no run has is left out, and a table without measures too.
    """
    known = {name for regime in comparison.regimes for name in _names(comparison, regime)}
    if not known:
        return []
    shown = [f"{name}/{when}" for name in MEASURES for when in WHEN]
    columns = [name for name in (*shown, *OF_ANSWERS) if name in known]
    head = ["regime", *(_heading(name, comparison) for name in columns)]
    rows = [[regime, *(_cell(comparison, regime, name) for name in columns)] for regime in comparison.regimes]
    grids = [Grid("Beyond accuracy (tokens: of an answer), mean over policies and seeds, 95 % interval", head, rows)]
    pairs = [name for name in sorted(known) if name.startswith("alone/") and name.endswith("/end")]
    differences = [_differences(comparison, columns)] if set(comparison.regimes) > {comparison.baseline} else []
    return grids + differences + ([_pairs(comparison, pairs)] if pairs else [])


def measures_of(outcome: RunOutcome) -> Mapping[str, float]:
    """Return all measures of one run by name; empty for a run without them."""
    return outcome.beyond.measures() if outcome.beyond else {}


def beyond_json(comparison: Comparison, regime: str) -> dict[str, Any]:
    """Return measure -> mean over seeds, and difference to the baseline; empty for a regime without measures.

    Measures have the names of `BeyondAccuracy.measures`.
    """
    return {
        name: {
            **interval_json(comparison.measured(regime, _measure(name))),
            "against_baseline": interval_json(comparison.measured_against_baseline(regime, _measure(name))),
        }
        for name in _names(comparison, regime)
    }


def _differences(comparison: Comparison, columns: list[str]) -> Grid:
    """Table of differences at the end alone, since all regimes begin with the same policies."""
    base = comparison.baseline
    columns = [name for name in columns if not name.endswith("/start")]
    head = ["regime", *(_heading(name, comparison) for name in columns)]
    rows = [
        [regime, *(signed_interval(comparison.measured_against_baseline(regime, _measure(name)), _digits(name))
                   for name in columns)]
        for regime in comparison.regimes if regime != base
    ]  # fmt: skip
    return Grid(f"Beyond accuracy, minus {base}, paired by seed", head, rows)


def _pairs(comparison: Comparison, names: list[str]) -> Grid:
    """Table with a row per regime and ordered pair: pairs grow with the square of policies, too many for columns."""
    head = ["regime: solved by, not by", *WHEN, f"end - {comparison.baseline}"]
    rows = []
    for regime in comparison.regimes:
        for name in names:
            _, one, other, _ = name.split("/")
            cells = [_cell(comparison, regime, f"alone/{one}/{other}/{when}") for when in WHEN]
            against = comparison.measured_against_baseline(regime, _measure(name))
            told = "" if regime == comparison.baseline else signed_interval(against)
            rows.append([f"{regime}: {one}, not {other}", *cells, told])
    return Grid("Share of held-out prompts that one policy solves and another does not", head, rows)


def _heading(name: str, comparison: Comparison) -> str:
    what, _, when = name.partition("/")
    if what == "union":
        what = f"union pass@{k}" if (k := _most_answers(comparison)) > 1 else "union"
    return f"{OF_ANSWERS.get(what, what)} {when or 'end'}"


def _most_answers(comparison: Comparison) -> int:
    found = (
        one.beyond.k for regime in comparison.regimes for one in comparison.outcomes[regime].values() if one.beyond
    )
    return max(found, default=1)


def _names(comparison: Comparison, regime: str) -> list[str]:
    return list(dict.fromkeys(name for one in comparison.outcomes[regime].values() for name in measures_of(one)))


def _cell(comparison: Comparison, regime: str, name: str) -> str:
    return plus_minus(comparison.measured(regime, _measure(name)), _digits(name))


def _digits(name: str) -> int:
    return DIGITS.get(name, 3)


def _measure(name: str) -> Callable[[RunOutcome], float]:
    return lambda outcome: measures_of(outcome).get(name, math.nan)


def interval_json(found: Interval) -> dict[str, float | None]:
    """Return an interval for JSON."""
    return {"mean": known_or_none(found.mean), "half": known_or_none(found.half)}


def known_or_none(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value
