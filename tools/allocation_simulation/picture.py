"""The figure: how near every rule comes to the bound, and one run of the controller."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl

from allocation_simulation.outcomes import CONTROLLER, Trial

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

SMOOTHED_POINTS = 6
HOUR_S = 3600.0
TIMELINE = "S4"


def draw(trials: Sequence[Trial], out: Path, required: float) -> None:
    """Write the figure; trials of random instances are left out."""
    figure, (bars, shares, progress) = plt.subplots(
        3, 1, figsize=(10, 11), height_ratios=(1.5, 1, 1), layout="constrained"
    )
    _bars(bars, trials, required)
    shown = next((one for one in trials if one.rule == CONTROLLER and one.scenario == TIMELINE), None)
    shown = shown or next(one for one in trials if one.rule == CONTROLLER)
    _timeline(shares, progress, shown)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _bars(axes: Axes, trials: Sequence[Trial], required: float) -> None:
    scenarios = list(dict.fromkeys(trial.scenario for trial in trials))
    names = list(dict.fromkeys(trial.rule for trial in trials))
    width = 0.85 / len(names)
    colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for index, name in enumerate(names):
        heights = []
        for scenario in scenarios:
            found = [trial.ratio for trial in trials if (trial.rule, trial.scenario) == (name, scenario)]
            heights.append(fmean(found) if found else 0.0)
        places = [place + (index - (len(names) - 1) / 2) * width for place in range(len(scenarios))]
        edge = "black" if name == CONTROLLER else "none"
        axes.bar(places, heights, width, label=name, color=colours[index % 20], edgecolor=edge)
    axes.axhline(required, color="grey", linestyle="--", linewidth=1)
    axes.text(len(scenarios) - 0.5, required, f" {required:g}", va="center", color="grey")
    axes.set_xticks(range(len(scenarios)), scenarios)
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("least progress / clairvoyant optimum")
    axes.set_title("How near every rule brings the slowest policy to what is possible (mean over seeds)")
    axes.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, -0.42), frameon=False)


def _timeline(shares: Axes, progress: Axes, trial: Trial) -> None:
    hours = [now_s / HOUR_S for now_s, _, _ in trial.timeline]
    names = list(trial.timeline[0][1])
    shares.stackplot(
        hours, [[units[name] for _, units, _ in trial.timeline] for name in names], labels=names, step="post"
    )
    shares.set_ylabel("units")
    shares.set_title(f"Controller, {trial.scenario}, seed {trial.seed}: units by owner, and what they feed")
    shares.legend(ncols=len(names), fontsize=8, loc="lower left")
    for name in names:
        busy_s = [busy[name] for _, _, busy in trial.timeline]
        span = range(SMOOTHED_POINTS, len(hours))
        rates = [
            (busy_s[i] - busy_s[i - SMOOTHED_POINTS]) / HOUR_S / (hours[i] - hours[i - SMOOTHED_POINTS]) for i in span
        ]
        progress.plot([hours[i] for i in span], rates, label=name)
    progress.set_ylabel("busy share of the learner")
    progress.set_xlabel("hours (each point: the half hour before)")
    progress.set_ylim(0.0, 1.02)
    progress.set_xlim(shares.get_xlim())
