"""Learning curves of a comparison: held-out accuracy over steps, of the average of policies and of each policy."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrl.plots import SOFT, png, quiet_style
from mrl.report.comparison import AVERAGE, Comparison
from mrl.report.comparison_table import seeds_told
from mrl.report.palette import colour_of

MARKS = "osD^vP<>"
PANEL_INCHES = (4.3, 3.9)
MIN_BAND_SEEDS = 5


def learning_curves(comparison: Comparison) -> bytes:
    """Return a PNG: one panel for the average, one per policy; a line per regime, thin lines for its seeds.

    From five seeds on, a band of the 95 % interval replaces the thin lines; with fewer seeds Student's interval is
    wider than the picture.
    """
    with quiet_style():
        return png(drawn(comparison))


def drawn(comparison: Comparison) -> Figure:
    """Return the learning curves as a figure of matplotlib."""
    names = [AVERAGE, *comparison.policies]
    size = (PANEL_INCHES[0] * len(names), PANEL_INCHES[1])
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        _draw(axes, comparison, name)
    panels[0].set_ylabel("held-out accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    order = _by_end(comparison)
    figure.legend(
        [handles[place] for place in order],
        [labels[place] for place in order],
        loc="outside lower center",
        ncols=min(len(labels), 8),
        frameon=False,
    )
    return figure


def _draw(axes: Axes, comparison: Comparison, name: str) -> None:
    for place, regime in enumerate(comparison.regimes):
        curve = comparison.mean_curve(regime, name)
        steps, found = list(curve), list(curve.values())
        colour, dashes = colour_of(place).light, "--" if regime == comparison.baseline else "-"
        means = [one.mean for one in found]
        axes.plot(steps, means, dashes, marker=MARKS[place % len(MARKS)], ms=4, lw=1.6, color=colour, label=regime)
        outcomes = comparison.outcomes[regime].values()
        if len(outcomes) >= MIN_BAND_SEEDS:
            low, high = [max(0.0, one.low) for one in found], [min(1.0, one.high) for one in found]
            axes.fill_between(steps, low, high, color=colour, alpha=0.10)
        elif len(outcomes) > 1:
            for outcome in outcomes:
                of_seed = outcome.curves[name]
                axes.plot(list(of_seed), list(of_seed.values()), dashes, lw=0.6, color=colour, alpha=0.45)
    numbers = {len(comparison.outcomes[regime]) for regime in comparison.regimes}
    axes.set_title("average of the policies" if name == AVERAGE else name)
    axes.set_xlabel("step")
    if name == AVERAGE:
        spread = "band: 95 % interval" if max(numbers) >= MIN_BAND_SEEDS else "thin lines: single seeds"
        whose = f"{max(numbers)} seeds" if len(numbers) == 1 else f"seeds ({seeds_told(comparison)})"
        note = f"mean of {whose}, {spread}" if max(numbers) > 1 else "one seed"
        axes.text(0.98, 0.03, note, transform=axes.transAxes, ha="right", color=SOFT, fontsize=8.5)


def _by_end(comparison: Comparison) -> list[int]:
    """Places of the regimes by accuracy at the end, highest first: the legend has the order of the lines' ends."""
    ends = [comparison.over_seeds(regime, "end").mean for regime in comparison.regimes]
    return sorted(range(len(ends)), key=lambda place: -ends[place])
