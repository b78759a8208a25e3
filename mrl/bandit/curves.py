"""Pictures over one quantity: success of the learner, mismatch, length of a sequence, rescue probability, training."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrl.bandit.labels import HALO, label_ends
from mrl.bandit.method_styles import LOOKS
from mrl.bandit.overlap import rescue_probability, sequence_growth
from mrl.bandit.stability_support_plots import SUPPORT, VARIANCE
from mrl.bandit.sweeps import Sweep
from mrl.bandit.toy import Curve
from mrl.plots import GHOST, INK, SOFT, sheet

BLUES = ("#ffffff", "#f3f8fc", "#e4eff8", "#d0e3f2", "#b3d1e9", "#8fbbdd", "#69a3cf", "#4a8cc0")
"""Colours from light to dark; dark writing stays readable on all of them."""


def two_panels(sweep: Sweep, x_label: str, titles: tuple[str, str], *, reference: float) -> Figure:
    """Draw support and variance of every main method; the quantity falls to the right, where the methods part.

    A thin line marks the reference instance.
    """
    figure = sheet(10.6, 4.7, left=0.9, right=1.3)
    panels = figure.subplots(1, 2, gridspec_kw={"wspace": 0.58})
    for axes, title, label, part in zip(panels, titles, (SUPPORT, VARIANCE), (0, 1), strict=True):
        ends = {}
        for name, path in sweep.paths.items():
            look = LOOKS[name]
            axes.plot(sweep.values_P, path[part], look.dashes, color=look.colour, lw=2)
            ends[name] = (sweep.values_P[0], path[part][0])
        axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=label)
        axes.margins(x=0, y=0.1)
        axes.invert_xaxis()
        axes.axvline(reference, color=SOFT, lw=0.9, ls=":")
        axes.set_title(title)
        label_ends(axes, ends, {name: name for name in ends})
    return figure


def sequence_picture() -> Figure:
    """Draw 1 + chi^2 of whole sequences against their length, one line per spread of the token log-ratio."""
    figure = sheet(8.2, 4.7, right=1.25)
    axes = figure.subplots()
    tokens, top = np.geomspace(16, 8192, 300), 1e6
    shades = ["#d98a3d", "#cf6a14", "#a34a05", "#6b2f00"]
    for spread, shade in zip((0.02, 0.05, 0.1, 0.2), shades, strict=True):
        growth = sequence_growth(tokens, spread)
        inside = growth <= top
        axes.plot(tokens[inside], growth[inside], color=shade, lw=2.4)
        axes.annotate(f"d = {spread:g}", (tokens[inside][-1], growth[inside][-1]), (-9, -10 if growth[-1] > top else 6),
                      textcoords="offset points", ha="right", color=shade, fontweight="bold")  # fmt: skip
    for rows in (8, 1024):
        axes.axhline(rows, color=SOFT, lw=0.9, ls=":")
        axes.annotate(f"{rows} peer rows\nfor one own row", (8192, rows), (6, 0), textcoords="offset points",
                      va="center", fontsize=9, color=SOFT, annotation_clip=False)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(16, 8192), ylim=(1, top))
    axes.set(xlabel="length of the answer T (tokens)", ylabel="1 + χ² of the answer = G' / ESS")
    axes.set_xticks([16, 64, 256, 1024, 4096], ["16", "64", "256", "1024", "4096"])
    axes.minorticks_off()
    axes.set_title("Exact reweighting of whole answers: d is the std of the token log-ratio (nats)")
    return figure


def rescue_picture(group: int) -> Figure:
    """Draw the probability that SGT has a rescue, over the success of learner and peer."""
    figure = sheet(7.6, 5.2)
    axes = figure.subplots()
    p, q = np.geomspace(1e-3, 0.999, 240), np.geomspace(1e-3, 0.999, 240)
    alpha = rescue_probability(*np.meshgrid(p, q), group, group)
    levels = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
    axes.contourf(p, q, alpha, levels=levels, colors=BLUES)
    axes.contour(p, q, alpha, levels=levels[1:-1], colors=INK, linewidths=0.8)
    for level in levels[1:-1]:
        height = float(np.interp(level, alpha[:, 0], q))
        axes.text(p[0] * 1.12, height, f"{100 * level:g} %", fontsize=9, va="center", path_effects=[HALO])
    axes.set(xscale="log", yscale="log", xlabel="success of the learner, p", ylabel="success of the peer, q")
    ticks = [0.001, 0.01, 0.1, 1.0]
    axes.set_xticks(ticks[:-1], [f"{tick:g}" for tick in ticks[:-1]])
    axes.set_yticks(ticks[:-1], [f"{tick:g}" for tick in ticks[:-1]])
    axes.grid(visible=False)
    axes.set_title(f"How often a rescue happens, G = G' = {group}")
    return figure


def toy_picture(curves: dict[str, Curve]) -> Figure:
    """Draw the mean success over training steps; the band spans the seeds."""
    figure = sheet(8.8, 5.0, right=1.75)
    axes = figure.subplots()
    ends, texts = {}, {}
    for name, curve in curves.items():
        look, steps = LOOKS[name], np.arange(curve.success_RS.shape[1])
        mean_S = curve.success_RS.mean(axis=0)
        axes.fill_between(steps, curve.success_RS.min(axis=0), curve.success_RS.max(axis=0), color=look.colour,
                          alpha=0.13, lw=0)  # fmt: skip
        axes.plot(steps, mean_S, look.dashes, color=look.colour, lw=2.1)
        ends[name], texts[name] = (steps[-1], mean_S[-1]), f"{name}  {mean_S[-1]:.2f}"
    last = max(end[0] for end in ends.values())
    axes.set(xlim=(0, last), ylim=(0, 1), xlabel="training step (one update of both policies)")
    axes.set_ylabel("mean success p over contexts and policies")
    axes.set_title("Two policies learn side by side")
    label_ends(axes, ends, texts)
    _seed_note(axes, curves)
    return figure


def _seed_note(axes: Axes, curves: dict[str, Curve]) -> None:
    seeds = len(next(iter(curves.values())).success_RS)
    note = f"mean of {seeds} seeds; bands span them" if seeds > 1 else "one seed"
    axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize=9, color=SOFT)
    axes.axhline(1.0, color=GHOST, lw=0.8)
