"""The whole study: numbers first, then pictures, then one page; all in memory until everything is there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from mrl.bandit import curves, stability_support_plots, sweeps
from mrl.bandit.closed_forms import prp_exact
from mrl.bandit.credit import CREDITS
from mrl.bandit.methods import Row, Settings, reference_rows
from mrl.bandit.overlap import chi_squared, rescue_probability
from mrl.bandit.problem import Bandit, Floats, reference_bandit
from mrl.bandit.study_page import ToyTable, page
from mrl.bandit.toy import Curve, Toy, table_steps, train_all
from mrl.errors import ConfigError
from mrl.files import replace_file
from mrl.plots import png, quiet_style

PAGE, NUMBERS = "bandit.html", "bandit.json"
PICTURES = (
    "plane.png", "success_lines.png", "plane_learner.png", "plane_peer.png", "plane_group.png", "plane_mismatch.png",
    "sequences.png", "residual.png", "rescue.png", "toy.png",
)  # fmt: skip
"""In the order of the page."""
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Size(NamedTuple):
    """How much is computed."""

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
    """Closed forms, Monte Carlo and the toy."""
    bandit, settings = reference_bandit(), Settings()
    rows = reference_rows(bandit, settings, size.draws, seed)
    return Results(bandit, settings, rows, train_all(size.toy, CREDITS, seed), size, seed)


def draw(results: Results) -> dict[str, bytes]:
    """Every picture as PNG, by file name."""
    with quiet_style():
        return {name: png(make(results)) for name, make in zip(PICTURES, _makers(), strict=True)}


def _makers() -> list[Callable[[Results], Figure]]:
    return [
        lambda results: stability_support_plots.plane_picture(results.rows),
        _success_lines,
        _learner_paths,
        _peer_paths,
        _group_paths,
        _mismatch_paths,
        lambda results: curves.sequence_picture(),
        _residual,
        lambda results: curves.rescue_picture(results.size.toy.group),
        lambda results: curves.toy_picture(results.curves),
    ]


def _success_lines(results: Results) -> Figure:
    titles = "Who still learns when success is rare", "What a step costs"
    swept = sweeps.over_p(results.bandit, results.settings, np.geomspace(1e-5, 0.9, 160))
    label = "success of the learner p, rarer to the right"
    return curves.two_panels(swept, label, titles, reference=results.bandit.p)


def _learner_paths(results: Results) -> Figure:
    values, marked = _with_marks(np.geomspace(1e-5, 0.9, 180), [1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9])
    swept = sweeps.over_p(results.bandit, results.settings, values)
    title = f"The learner's success p grows from 0.00001 to 0.9   (peer's q = {results.bandit.q:.2f}; dots carry p)"
    return stability_support_plots.path_picture(swept, title, marked, _plain)


def _peer_paths(results: Results) -> Figure:
    values, marked = _with_marks(np.geomspace(1e-3, 0.97, 160), [1e-3, 0.01, 0.1, 0.5, 0.97])
    swept = sweeps.over_q(results.bandit, results.settings, values)
    title = f"The peer's success q grows from 0.001 to 0.97   (learner's p = {results.bandit.p:.3f}; dots carry q)"
    return stability_support_plots.path_picture(swept, title, marked, _plain)


def _group_paths(results: Results) -> Figure:
    swept = sweeps.over_group(results.bandit, results.settings, GROUPS)
    marked = [index for index, size in enumerate(GROUPS) if size in (2, 8, 32, 128)]
    title = "Both groups grow from 2 to 128 rows   (dots carry G = G')"
    return stability_support_plots.path_picture(swept, title, marked, _plain)


def _mismatch_paths(results: Results) -> Figure:
    swept = sweeps.over_mismatch(results.bandit, results.settings, np.linspace(0, 4.6, 160))
    marked = [int(np.argmin(np.abs(swept.values_P - at))) for at in (0.33, 3, 30, 300, 3000)]
    title = f"The peer prefers other arms, p and q stay   (dots carry χ², {swept.values_P[0]:.2g} at least)"
    return stability_support_plots.path_picture(
        swept, title, marked, lambda chi: f"{chi:.2g}" if chi < 10 else f"{chi:.0f}"
    )


def _with_marks(values: Floats, marks: list[float]) -> tuple[Floats, list[int]]:
    """The values with the marks among them, and where the marks stand."""
    merged = np.unique(np.concatenate([values, marks]))
    return merged, [int(np.argmin(np.abs(merged - mark))) for mark in marks]


def _plain(value: float) -> str:
    return f"{value:.5f}".rstrip("0").rstrip(".")


def _residual(results: Results) -> Figure:
    bandit, size = results.bandit, results.settings.peer_group
    kappas, _ = _with_marks(np.geomspace(0.01, 3, 60), [0.3, 1.0, 2.0])
    residual = sweeps.over_residual(bandit, results.settings, kappas, results.size.residuals, results.seed)
    exact = prp_exact(bandit, size, bandit.p)
    place = exact.variance, exact.support(bandit)
    return stability_support_plots.residual_picture(residual, place, float(np.linalg.norm(bandit.gradient)))


def numbers(results: Results) -> dict[str, Any]:
    """Everything that the page states, for programs."""
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


def toy_table(results: Results) -> ToyTable:
    """Mean success per method after a sixth of the steps and at the end."""
    steps = table_steps(results.size.toy)
    return ToyTable(steps, {name: [curve.after(step) for step in steps] for name, curve in results.curves.items()})


def check_folder(folder: Path) -> None:
    """Raises ConfigError when the folder cannot be made or holds anything that is not ours, hidden files aside."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written", where=f"--out {folder}", got=str(nearest), wanted="a writable folder")
    foreign = sorted(
        path.name
        for path in (folder.iterdir() if folder.exists() else ())
        if path.name not in (PAGE, NUMBERS, *PICTURES) and not path.name.startswith(".")
    )
    if foreign:
        raise ConfigError(
            "the folder holds files of something else",
            where=f"--out {folder}",
            got=foreign[0],
            cure="name a new or empty folder, or one that `mrl bandit` wrote",
        )


def write(folder: Path, results: Results) -> list[Path]:
    """Write pictures, numbers and page, each file whole, the page last; returns their paths, the page first.

    Raises ConfigError for a folder with other files, or one that cannot be made.
    """
    pictures = draw(results)
    figures = numbers(results)
    html = page(figures, results.rows, toy_table(results), pictures)
    files = pictures | {NUMBERS: (json.dumps(figures, indent=1) + "\n").encode(), PAGE: html.encode()}
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(folder / name, data)
    return [folder / name for name in reversed(files)]
