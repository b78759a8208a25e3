"""The whole study in memory: the contents of its tables, its numbers for programs, its pictures."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from mrl.bandit import curves, stability_support_plots, sweeps
from mrl.bandit.closed_forms import prp_exact
from mrl.bandit.credit import CREDITS
from mrl.bandit.methods import Row, Settings, reference_rows
from mrl.bandit.overlap import chi_squared, rescue_probability
from mrl.bandit.problem import Bandit, reference_bandit
from mrl.bandit.toy import Curve, Toy, train_all
from mrl.plots import png, quiet_style


class Size(NamedTuple):
    """Size of the study: Monte Carlo draws, random residuals, and the toy."""

    draws: int
    residuals: int
    toy: Toy


FULL = Size(400_000, 200, Toy())
QUICK = Size(40_000, 60, Toy(contexts=100, steps=120, seeds=1))


class Results(NamedTuple):
    """Numbers of the study."""

    bandit: Bandit
    settings: Settings
    rows: list[Row]
    curves: dict[str, Curve]
    size: Size
    seed: int


def compute(size: Size, seed: int) -> Results:
    """Compute closed forms, Monte Carlo and the toy."""
    bandit, settings = reference_bandit(), Settings()
    rows = reference_rows(bandit, settings, size.draws, seed)
    return Results(bandit, settings, rows, train_all(size.toy, CREDITS, seed), size, seed)


def draw(results: Results) -> dict[str, bytes]:
    """Draw every picture as PNG; return file name -> bytes."""
    with quiet_style():
        return {name: png(make(results)) for name, make in PICTURES.items()}


def _success_lines(results: Results) -> Figure:
    titles = "Who still learns when success is rare", "What a step costs"
    swept = sweeps.over_p(results.bandit, results.settings, np.geomspace(1e-5, 0.9, 160))
    label = "success of the learner p, rarer to the right"
    return curves.two_panels(swept, label, titles, reference=results.bandit.p)


def _residual(results: Results) -> Figure:
    bandit, size = results.bandit, results.settings.peer_group
    kappas = np.union1d(np.geomspace(0.01, 3, 60), [0.3, 1.0, 2.0])
    residual = sweeps.over_residual(bandit, results.settings, kappas, results.size.residuals, results.seed)
    exact = prp_exact(bandit, size, bandit.p)
    place = exact.variance, exact.support(bandit)
    return stability_support_plots.residual_picture(residual, place, float(np.linalg.norm(bandit.gradient)))


PICTURES: dict[str, Callable[[Results], Figure]] = {
    "plane.png": lambda results: stability_support_plots.plane_picture(results.rows),
    "success_lines.png": _success_lines,
    "sequences.png": lambda results: curves.sequence_picture(),
    "residual.png": _residual,
    "rescue.png": lambda results: curves.rescue_picture(results.size.toy.group),
    "toy.png": lambda results: curves.toy_picture(results.curves),
}


def numbers(results: Results) -> dict[str, Any]:
    """Return the contents of `bandit.json`, for programs."""
    bandit, settings = results.bandit, results.settings
    alpha = float(rescue_probability(bandit.p, bandit.q, settings.group, settings.peer_group))
    instance = {"p": bandit.p, "q": bandit.q, "chi_squared": chi_squared(bandit), "rescue_probability": alpha}
    methods = {row.name: row._asdict() | {"measured": row.measured._asdict()} for row in results.rows}
    toy = {name: curve.success_RS.mean(axis=0).round(5).tolist() for name, curve in results.curves.items()}
    return {
        "seed": results.seed,
        "draws": results.size.draws,
        "settings": settings._asdict(),
        "instance": instance,
        "methods": methods,
        "toy": results.size.toy._asdict() | {"rules": results.size.toy.rules._asdict()},
        "toy_success_per_step": toy,
    }
